//! Values as Python prints them: `str`, `repr`, `float.__repr__` and `json.dumps`, since templates are written against
//! jinja2 in transformers.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

use super::trust::Table;

/// Nesting deeper than this is refused.
pub(super) const MAX_DEPTH: usize = 100;

pub(super) fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// `str(value)`; an undefined value is empty. `limit`: at most so many bytes.
pub(super) fn to_str(value: &Value, limit: usize) -> Result<String, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.to_owned());
    }
    let mut out = String::new();
    if !value.is_undefined() {
        repr(value, &mut out, limit, 0)?;
    }
    Ok(out)
}

fn repr(value: &Value, out: &mut String, limit: usize, depth: usize) -> Result<(), Error> {
    check(out, limit, depth)?;
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push_str(&number(value)),
        ValueKind::String => repr_str(value.as_str().unwrap_or_default(), out),
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (i, item) in value.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(&item, out, limit, depth + 1)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(&key, out, limit, depth + 1)?;
                out.push_str(": ");
                repr(&value.get_item(&key)?, out, limit, depth + 1)?;
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

fn check(out: &str, limit: usize, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(invalid(format!("a value is nested more than {MAX_DEPTH} deep")));
    }
    if out.len() > limit {
        return Err(invalid(format!("a text grows beyond {limit} bytes")));
    }
    Ok(())
}

/// `str.__repr__`: single quotes unless only they occur in the text.
fn repr_str(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if c < ' ' || ('\x7f'..='\u{a0}').contains(&c) || c == '\u{ad}' => {
                out.push_str(&format!("\\x{:02x}", c as u32));
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// A number as Python prints it.
fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float)
}

/// `float.__repr__`: the shortest digits that read back as the same number, with an exponent below 1e-4 and from 1e16 on.
pub(super) fn float(x: f64) -> String {
    if !x.is_finite() {
        return if x.is_nan() {
            "nan"
        } else if x > 0.0 {
            "inf"
        } else {
            "-inf"
        }
        .to_owned();
    }
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>() {
        Ok(e) if !(-4..16).contains(&e) => {
            format!("{digits}e{}{:02}", if e < 0 { '-' } else { '+' }, e.unsigned_abs())
        }
        _ => {
            let plain = format!("{x}");
            if plain.contains('.') {
                plain
            } else {
                format!("{plain}.0")
            }
        }
    }
}

/// Arguments of `json.dumps`, with transformers' defaults.
#[derive(Debug, Clone, Default)]
pub(super) struct Dumps {
    pub(super) ensure_ascii: bool,
    /// The text of one level of indentation; `None` for one line.
    pub(super) indent: Option<String>,
    /// Item and key separators.
    pub(super) separators: Option<(String, String)>,
    pub(super) sort_keys: bool,
}

/// `json.dumps(value, …)` in which marks stay marks.
pub(super) fn to_json(value: &Value, options: &Dumps, marks: &Table, limit: usize) -> Result<String, Error> {
    let (item, key) = match &options.separators {
        Some((item, key)) => (item.as_str(), key.as_str()),
        None if options.indent.is_some() => (",", ": "),
        None => (", ", ": "),
    };
    let mut json = Json { out: String::new(), options, marks, item, key, limit };
    json.value(value, 0)?;
    Ok(json.out)
}

struct Json<'a> {
    out: String,
    options: &'a Dumps,
    marks: &'a Table,
    item: &'a str,
    key: &'a str,
    limit: usize,
}

impl Json<'_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        check(&self.out, self.limit, depth)?;
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&json_number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let mut open = false;
                for item in value.try_iter()? {
                    self.separate('[', &mut open, depth);
                    self.value(&item, depth + 1)?;
                }
                self.close("[", ']', open, depth);
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.options.sort_keys {
                    keys.sort();
                }
                let mut open = false;
                for key in keys {
                    self.separate('{', &mut open, depth);
                    match key.kind() {
                        ValueKind::String => self.string(key.as_str().unwrap_or_default()),
                        ValueKind::None => self.out.push_str("\"null\""),
                        ValueKind::Bool => {
                            self.out.push_str(if key.is_true() { "\"true\"" } else { "\"false\"" })
                        }
                        ValueKind::Number => self.string(&json_number(&key)),
                        kind => {
                            return Err(invalid(format!(
                                "keys must be str, int, float, bool or None, not {kind}"
                            )))
                        }
                    }
                    self.out.push_str(self.key);
                    self.value(&value.get_item(&key)?, depth + 1)?;
                }
                self.close("{", '}', open, depth);
            }
            kind => return Err(invalid(format!("a value of type {kind} is not JSON serializable"))),
        }
        Ok(())
    }

    fn separate(&mut self, bracket: char, open: &mut bool, depth: usize) {
        if *open {
            self.out.push_str(self.item);
        } else {
            self.out.push(bracket);
            *open = true;
        }
        self.new_line(depth + 1);
    }

    fn close(&mut self, bracket: &str, end: char, open: bool, depth: usize) {
        if open {
            self.new_line(depth);
        } else {
            self.out.push_str(bracket);
        }
        self.out.push(end);
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.options.indent {
            self.out.push('\n');
            for _ in 0..depth {
                self.out.push_str(indent);
            }
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match self.marks.original(c) {
                Some(o @ ('"' | '\\')) => {
                    self.out.push('\\');
                    self.out.push(if o == c { o } else { c });
                }
                Some('\n') => self.out.push_str("\\n"),
                Some('\r') => self.out.push_str("\\r"),
                Some('\t') => self.out.push_str("\\t"),
                Some('\u{8}') => self.out.push_str("\\b"),
                Some('\u{c}') => self.out.push_str("\\f"),
                Some(o) if o < ' ' => self.out.push_str(&format!("\\u{:04x}", o as u32)),
                Some(o) if self.options.ensure_ascii && o > '~' => {
                    let mut units = [0; 2];
                    for unit in o.encode_utf16(&mut units) {
                        self.out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                _ => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

fn json_number(value: &Value) -> String {
    match number(value).as_str() {
        "nan" => "NaN".to_owned(),
        "inf" => "Infinity".to_owned(),
        "-inf" => "-Infinity".to_owned(),
        finite => finite.to_owned(),
    }
}
