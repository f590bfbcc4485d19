//! The model's own chat template, behaving as jinja2 does in transformers, with two differences: text that a user wrote
//! never becomes a control token (`trust.rs`), and a template has bounds (`limits.rs`).
//!
//! minijinja parses and runs the template. Its operators are exchanged for bounded ones between compiling and running, for
//! which its `unstable_machinery` is used and the version pinned.

mod builtins;
mod clock;
mod limits;
mod methods;
mod operators;
mod python;
mod trust;

use std::collections::{BTreeMap, BTreeSet};

use minijinja::machinery::{make_string_output, parse, CodeGenerator, Vm};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Value};
use serde_json::{Map, Value as Json};

use crate::error::{Error, Result};
use crate::tokenizer::{AddedTokens, NamedTokens, Piece, Tokenizer};
use limits::Budget;
use trust::{collect_taken, Edges, Marks};

/// Roles that templates write into the prompt as they are. Another role is text of the user.
const ROLES: [&str; 6] = ["system", "user", "assistant", "tool", "developer", "function"];

/// A compiled chat template.
#[derive(Debug, Clone)]
pub struct Template {
    source: String,
    named: NamedTokens,
    edges: Edges,
    clock: fn() -> i64,
}

impl Template {
    /// Compiles a template. `named` become `bos_token`, `eos_token` and `pad_token`; `added` are the tokens that untrusted text
    /// may not spell.
    ///
    /// # Errors
    /// `template_error` with the reason and the line, when the source is no template or passes a limit.
    pub fn new(source: &str, named: NamedTokens, added: AddedTokens) -> Result<Template> {
        let source = without_generation_tags(source);
        let template = Template { source, named, edges: Edges::new(added), clock: clock::utc };
        limits::steps(&template.source, 0).map_err(template_error)?;
        parse(&template.source, "chat_template", SyntaxConfig, limits::white_space())
            .map_err(template_error)?;
        Ok(template)
    }

    /// Compiles a template for a model's tokenizer.
    pub fn for_tokenizer(source: &str, tokenizer: &Tokenizer) -> Result<Template> {
        Template::new(source, tokenizer.named_tokens().clone(), tokenizer.added_tokens().clone())
    }

    /// Sets the clock of `strftime_now`: seconds since 1970 as the clock on the wall shows them. UTC unless set.
    pub fn set_clock(&mut self, clock: fn() -> i64) {
        self.clock = clock;
    }

    /// The source as it was compiled.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a conversation to pieces: the added tokens that the template (or the assistant) wrote are trusted, all
    /// between is not. [`pieces_to_text`] gives the prompt as text, [`Tokenizer::encode_prompt`] its ids.
    ///
    /// `messages` is an array of OpenAI's messages, `tools` one of tools (`None` is `none` in the template);
    /// `add_generation_prompt: None` leaves the variable undefined; `kwargs` are further variables, which cannot replace these.
    /// Everything but assistant messages is taken for untrusted.
    ///
    /// # Errors
    /// `template_error` where jinja2 would raise one, with the text of `raise_exception`, or at a limit of steps or bytes.
    pub fn render(
        &self,
        messages: &Json,
        tools: Option<&Json>,
        add_generation_prompt: Option<bool>,
        kwargs: &Map<String, Json>,
    ) -> Result<Vec<Piece>> {
        let mut input = Input::default();
        collect_taken(&self.source, &mut input.taken);
        input.add(messages, 0)?;
        if let Some(tools) = tools {
            input.add(tools, 0)?;
        }
        for (key, value) in kwargs {
            input.add_text(key);
            input.add(value, 0)?;
        }
        let marks = self.edges.marks(&input.taken)?;
        let budget = Budget::new(input.bytes);
        let steps = limits::steps(&self.source, input.nodes).map_err(template_error)?;

        let mut variables: BTreeMap<&str, Value> = BTreeMap::new();
        for (name, value) in kwargs.iter().filter(|(name, _)| is_identifier(name)) {
            variables.insert(name, untrusted(value, &marks));
        }
        let named =
            [("bos_token", &self.named.bos), ("eos_token", &self.named.eos), ("pad_token", &self.named.pad)];
        for (name, text) in named {
            match text {
                Some(text) => variables.insert(name, Value::from(text.as_str())),
                None => variables.remove(name),
            };
        }
        variables.insert("messages", conversation(messages, &marks));
        variables.insert("tools", tools.map_or(Value::from(()), |tools| untrusted(tools, &marks)));
        variables.entry("documents").or_insert(Value::from(()));
        match add_generation_prompt {
            Some(flag) => variables.insert("add_generation_prompt", Value::from(flag)),
            None => variables.remove("add_generation_prompt"),
        };
        let rendered = self.run(variables, &marks, &budget, steps).map_err(template_error)?;
        Ok(marks.pieces(&rendered))
    }

    fn run(
        &self,
        variables: BTreeMap<&str, Value>,
        marks: &Marks,
        budget: &Budget,
        steps: u64,
    ) -> std::result::Result<String, minijinja::Error> {
        let name = "chat_template";
        let tree = parse(&self.source, name, SyntaxConfig, limits::white_space())?;
        let mut generator = CodeGenerator::new(name, &self.source);
        generator.compile_stmt(&tree);
        let (mut code, mut blocks) = generator.finish();
        limits::check_chains(blocks.values().chain([&code]))?;
        limits::guard(&mut code);
        blocks.values_mut().for_each(limits::guard);
        let env = builtins::environment(marks.table(), budget, steps, (self.clock)());
        let mut rendered = String::new();
        let root = variables.into_iter().collect::<Value>();
        Vm::new(&env).eval(&code, root, &blocks, &mut make_string_output(&mut rendered), AutoEscape::None)?;
        Ok(rendered)
    }
}

/// The prompt as one text.
pub fn pieces_to_text(pieces: &[Piece]) -> String {
    pieces.iter().map(|piece| piece.text.as_str()).collect()
}

/// The size of a request, and its characters that cannot be marks.
#[derive(Debug, Default)]
struct Input {
    bytes: usize,
    nodes: usize,
    taken: BTreeSet<char>,
}

impl Input {
    fn add(&mut self, value: &Json, depth: usize) -> Result<()> {
        if depth > python::MAX_DEPTH {
            let most = python::MAX_DEPTH;
            return Err(Error::template_error(format!(
                "messages, tools and variables nest at most {most} deep"
            )));
        }
        self.nodes += 1;
        match value {
            Json::String(text) => self.add_text(text),
            Json::Array(items) => {
                for item in items {
                    self.add(item, depth + 1)?;
                }
            }
            Json::Object(pairs) => {
                for (key, value) in pairs {
                    self.add_text(key);
                    self.add(value, depth + 1)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn add_text(&mut self, text: &str) {
        self.bytes += text.len();
        collect_taken(text, &mut self.taken);
    }
}

/// JSON as a template's value, its texts as `text` makes them from the key they stand under.
fn convert(value: &Json, key: &str, text: &dyn Fn(&str, &str) -> String) -> Value {
    match value {
        Json::Null => Value::from(()),
        Json::Bool(flag) => Value::from(*flag),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(n), _) => Value::from(n),
            (_, Some(n)) => Value::from(n),
            _ => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(string) => Value::from(text(key, string)),
        Json::Array(items) => items.iter().map(|item| convert(item, key, text)).collect(),
        Json::Object(pairs) => {
            pairs.iter().map(|(key, value)| (Value::from(text("", key)), convert(value, key, text))).collect()
        }
    }
}

fn untrusted(value: &Json, marks: &Marks) -> Value {
    convert(value, "", &|_, text| marks.mark(text))
}

/// The messages, with marks in everything that the assistant did not write.
fn conversation(messages: &Json, marks: &Marks) -> Value {
    let plain = |message: &Json| convert(message, "", &|_, text| text.to_owned());
    let message = |message: &Json| match message.get("role").and_then(Json::as_str) {
        Some("assistant") => plain(message),
        _ => convert(message, "", &|key, text| match key {
            "role" if ROLES.contains(&text) => text.to_owned(),
            "role" | "name" | "tool_call_id" | "content" => marks.mark_name(text),
            _ => marks.mark(text),
        }),
    };
    match messages {
        Json::Array(messages) => messages.iter().map(message).collect(),
        other => untrusted(other, marks),
    }
}

fn is_identifier(name: &str) -> bool {
    !name.is_empty()
        && name.chars().all(|c| c == '_' || c.is_alphanumeric())
        && !name.starts_with(|c: char| c.is_numeric())
}

/// transformers knows a `generation` block that marks the assistant's text for training; it prints its content.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |at| at + 2);
        let inner = tag[2..end].trim_end_matches("%}").trim_matches(['-', '+']).trim();
        match inner {
            "generation" => out.push_str(&tag[..end].replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag[..end].replacen("endgeneration", "endif", 1)),
            _ => out.push_str(&tag[..end]),
        }
        rest = &tag[end..];
    }
    out.push_str(rest);
    out
}

fn template_error(error: minijinja::Error) -> Error {
    let what = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    match error.line() {
        Some(line) => Error::template_error(format!("{what} (line {line} of the chat template)")),
        None => Error::template_error(what),
    }
}
