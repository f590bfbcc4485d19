//! The one error type of the engine. Each variant is one stable code of the public API (`ErrorCode` in `index.d.ts`);
//! the message says what was expected and what was found.

use thiserror::Error as ThisError;

/// Result of everything in this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong; [`Error::code`] is the stable name that crosses to JavaScript.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum Error {
    /// The bytes are no model file at all (an HTML page, an empty body, another format).
    #[error("not a model: {0}")]
    NotAModel(String),
    /// A model file that is damaged, cut short or contradicts itself.
    #[error("bad model: {0}")]
    BadModel(String),
    /// A sound file whose architecture, tokenizer or template this engine does not serve.
    #[error("unsupported model: {0}")]
    UnsupportedModel(String),
    /// A sound file with a tensor type this engine does not serve.
    #[error("unsupported quantization: {0}")]
    UnsupportedQuantization(String),
    /// The plan does not fit: too many bytes for this machine or for 4 GiB of wasm memory.
    #[error("too large: {0}")]
    TooLarge(String),
    /// An allocation failed while running.
    #[error("out of memory: {0}")]
    OutOfMemory(String),
    /// The network failed before or while the body was read.
    #[error("network: {0}")]
    Network(String),
    /// The server answered with another status than the one needed.
    #[error("http status: {0}")]
    HttpStatus(String),
    /// Bytes differ from the hash that was promised.
    #[error("integrity: {0}")]
    Integrity(String),
    /// A request field is unknown, out of range or senseless.
    #[error("invalid request: {0}")]
    InvalidRequest(String),
    /// The chat template refused the messages or could not be compiled.
    #[error("template error: {0}")]
    Template(String),
    /// Prompt and answer do not fit into the context.
    #[error("context overflow: {0}")]
    ContextOverflow(String),
    /// Logits were NaN or infinite.
    #[error("numeric: {0}")]
    Numeric(String),
    /// The request was cancelled by its caller.
    #[error("aborted: {0}")]
    Aborted(String),
    /// The engine was closed.
    #[error("closed: {0}")]
    Closed(String),
}

macro_rules! kinds {
    ($($variant:ident $make:ident $code:literal),* $(,)?) => {
        impl Error {
            /// The stable code of the public API.
            pub fn code(&self) -> &'static str {
                match self { $(Error::$variant(_) => $code),* }
            }
            /// An error of the same code.
            fn with_message(&self, message: String) -> Self {
                match self { $(Error::$variant(_) => Error::$variant(message)),* }
            }
            $(
                #[doc = concat!("An error with code `", $code, "`.")]
                pub fn $make(message: impl Into<String>) -> Self {
                    Error::$variant(message.into())
                }
            )*
        }
    };
}

kinds! {
    NotAModel not_a_model "not_a_model",
    BadModel bad_model "bad_model",
    UnsupportedModel unsupported_model "unsupported_model",
    UnsupportedQuantization unsupported_quantization "unsupported_quantization",
    TooLarge too_large "too_large",
    OutOfMemory out_of_memory "out_of_memory",
    Network network "network",
    HttpStatus http_status "http_status",
    Integrity integrity "integrity",
    InvalidRequest invalid_request "invalid_request",
    Template template_error "template_error",
    ContextOverflow context_overflow "context_overflow",
    Numeric numeric "numeric",
    Aborted aborted "aborted",
    Closed closed "closed",
}

/// Characters of a JSON parser's message that are shown: it may quote the whole text it stumbled over.
const SHOWN: usize = 200;

impl Error {
    /// `bad_model` for a file of a model that is no JSON, or not the JSON that was expected.
    pub fn bad_json(file: &str, error: &serde_json::Error) -> Self {
        let shown: String = error.to_string().chars().take(SHOWN).collect();
        Error::bad_model(format!("{file} cannot be read: {shown}"))
    }

    /// Whether it is a file's bytes that are wrong, and not the way to them.
    pub fn is_of_bytes(&self) -> bool {
        matches!(
            self,
            Error::NotAModel(_)
                | Error::BadModel(_)
                | Error::UnsupportedModel(_)
                | Error::UnsupportedQuantization(_)
                | Error::Integrity(_)
        )
    }

    /// The same error with another message.
    pub fn map_message(self, make: impl FnOnce(String) -> String) -> Self {
        let message = make(self.message());
        self.with_message(message)
    }

    /// The message without the code's name before it.
    pub fn message(&self) -> String {
        let whole = self.to_string();
        match whole.split_once(": ") {
            Some((_, rest)) => rest.to_string(),
            None => whole,
        }
    }
}

/// For errors that pass through a candle operation; [`Error`]'s own conversion gets them back.
#[cfg(feature = "engine")]
impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        candle_core::Error::WrappedContext { wrapped: Box::new(error), context: String::new() }
    }
}

#[cfg(feature = "engine")]
impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        match error {
            candle_core::Error::WithBacktrace { inner, .. } => (*inner).into(),
            candle_core::Error::WrappedContext { wrapped, .. } if wrapped.is::<Error>() => wrapped
                .downcast::<Error>()
                .map_or_else(|_| unreachable!("its type was just asked"), |error| *error),
            // Shapes were validated when the model was loaded; what remains is a size candle could not serve.
            error => Error::BadModel(format!("tensor operation failed: {error}")),
        }
    }
}

#[cfg(all(test, feature = "engine"))]
mod tests {
    use super::*;

    #[test]
    fn an_error_keeps_its_code_through_a_candle_operation() {
        let through: Error = candle_core::Error::from(Error::numeric("a key is not finite")).bt().into();
        assert_eq!((through.code(), through.message().as_str()), ("numeric", "a key is not finite"));
        let own: Error = candle_core::Error::Msg("shape".into()).into();
        assert_eq!(own.code(), "bad_model");
    }
}
