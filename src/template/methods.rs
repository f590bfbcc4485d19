//! Python's string methods. What is not here (methods of dicts and lists, and rare ones of strings) comes from
//! `minijinja-contrib`'s `pycompat`; those that are here differ there from Python or have no bound.

use minijinja::value::{from_args, Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

use super::limits::Budget;
use super::python::{invalid, to_str};

/// A method call on a value, whose result is taken off the budget.
pub(super) fn call(
    budget: &Budget,
    state: &State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    // `count` of a list compares; other methods of lists and maps look up.
    match method {
        "count" => budget.read(value)?,
        _ => budget.read_text(value)?,
    }
    args.iter().try_for_each(|arg| budget.read(arg))?;
    let result = match value.as_str() {
        Some(text) => match string_method(budget, text, method, args) {
            Err(e) if e.kind() == ErrorKind::UnknownMethod && method != "format" && method != "count" => {
                pycompat::unknown_method_callback(state, value, method, args)
            }
            result => result,
        },
        None => pycompat::unknown_method_callback(state, value, method, args),
    }?;
    budget.take_value(result)
}

/// White space as `str.strip()` and `str.split()` take it.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

fn string_method(budget: &Budget, text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    Ok(match method {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<Value>,) = from_args(args)?;
            let chars = chars.filter(|chars| !chars.is_none());
            let set: Option<Vec<char>> = match &chars {
                None => None,
                Some(chars) => {
                    Some(chars.as_str().ok_or_else(|| invalid("strip takes a string"))?.chars().collect())
                }
            };
            let drop = |c: char| set.as_ref().map_or_else(|| is_space(c), |set| set.contains(&c));
            let text = if method == "rstrip" { text } else { text.trim_start_matches(drop) };
            Value::from(if method == "lstrip" { text } else { text.trim_end_matches(drop) })
        }
        "split" | "rsplit" => {
            let (separator, most, kwargs): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
            let separator = separator.or(kwargs.get("sep")?).filter(|separator| !separator.is_none());
            let most =
                most.or(kwargs.get("maxsplit")?).and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
            kwargs.assert_all_used()?;
            budget.take(text.len())?;
            let mut parts = match &separator {
                None => split_space(text, most, method == "rsplit"),
                Some(separator) => {
                    let separator = separator.as_str().filter(|s| !s.is_empty());
                    let separator =
                        separator.ok_or_else(|| invalid("split takes a separator that is not empty"))?;
                    let most = most.saturating_add(1);
                    if method == "split" {
                        text.splitn(most, separator).collect()
                    } else {
                        let mut parts: Vec<&str> = text.rsplitn(most, separator).collect();
                        parts.reverse();
                        parts
                    }
                }
            };
            parts.shrink_to_fit();
            parts.into_iter().map(Value::from).collect()
        }
        "replace" => {
            let (old, new, count): (&str, &str, Option<i64>) = from_args(args)?;
            Value::from(replace(budget, text, old, new, count)?)
        }
        "startswith" | "endswith" => {
            let (parts,): (Value,) = from_args(args)?;
            let test = |part: &Value| match (part.as_str(), method) {
                (None, _) => Err(invalid(format!("{method} takes strings, not {}", part.kind()))),
                (Some(part), "startswith") => Ok(text.starts_with(part)),
                (Some(part), _) => Ok(text.ends_with(part)),
            };
            let mut found = false;
            if matches!(parts.kind(), ValueKind::Seq | ValueKind::Iterable) {
                for part in parts.try_iter()? {
                    found |= test(&part)?;
                }
            } else {
                found = test(&parts)?;
            }
            Value::from(found)
        }
        "removeprefix" => Value::from(one(args).map(|part| text.strip_prefix(part).unwrap_or(text))?),
        "removesuffix" => Value::from(one(args).map(|part| text.strip_suffix(part).unwrap_or(text))?),
        "find" | "index" => position(text, text.find(one(args)?), method)?,
        "rfind" | "rindex" => position(text, text.rfind(one(args)?), method)?,
        "count" => Value::from(text.matches(one(args)?).count()),
        "isdigit" | "isnumeric" => all(text, char::is_numeric),
        "isalnum" => all(text, char::is_alphanumeric),
        "isalpha" => all(text, char::is_alphabetic),
        "isspace" => all(text, is_space),
        "join" => {
            let (items,): (Value,) = from_args(args)?;
            Value::from(join(budget, &items, text)?)
        }
        "splitlines" => {
            let (keep,): (Option<bool>,) = from_args(args)?;
            budget.take(text.len())?;
            split_lines(text, keep.unwrap_or(false)).into_iter().map(Value::from).collect()
        }
        _ => return Err(Error::from(ErrorKind::UnknownMethod)),
    })
}

fn one(args: &[Value]) -> Result<&str, Error> {
    from_args::<(&str,)>(args).map(|(part,)| part)
}

fn all(text: &str, test: fn(char) -> bool) -> Value {
    Value::from(!text.is_empty() && text.chars().all(test))
}

/// A byte position as Python's count of characters.
fn position(text: &str, at: Option<usize>, method: &str) -> Result<Value, Error> {
    match at {
        Some(at) => Ok(Value::from(text[..at].chars().count())),
        None if method.ends_with("index") => Err(invalid("substring not found")),
        None => Ok(Value::from(-1)),
    }
}

/// `str.split()`: at runs of white space; what is left at the limit keeps the white space of its far side.
fn split_space(text: &str, most: usize, from_right: bool) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest =
        if from_right { text.trim_end_matches(is_space) } else { text.trim_start_matches(is_space) };
    while !rest.is_empty() {
        let cut = if from_right { rest.rfind(is_space) } else { rest.find(is_space) };
        let Some(cut) = cut.filter(|_| parts.len() < most) else {
            parts.push(rest);
            break;
        };
        let wide = rest[cut..].chars().next().map_or(1, char::len_utf8);
        let (left, right) = (&rest[..cut], &rest[cut + wide..]);
        parts.push(if from_right { right } else { left });
        rest = if from_right { left.trim_end_matches(is_space) } else { right.trim_start_matches(is_space) };
    }
    if from_right {
        parts.reverse();
    }
    parts
}

/// `str.splitlines`
fn split_lines(text: &str, keep: bool) -> Vec<&str> {
    let is_break = |c: char| {
        matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}')
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let Some(at) = rest.find(is_break) else {
            lines.push(rest);
            break;
        };
        let wide = if rest[at..].starts_with("\r\n") {
            2
        } else {
            rest[at..].chars().next().map_or(1, char::len_utf8)
        };
        lines.push(&rest[..if keep { at + wide } else { at }]);
        rest = &rest[at + wide..];
    }
    lines
}

/// `str.replace`, with its size known before it is made.
pub(super) fn replace(
    budget: &Budget,
    text: &str,
    old: &str,
    new: &str,
    count: Option<i64>,
) -> Result<String, Error> {
    let most = count.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
    let found = text.matches(old).count().min(most);
    budget.take(text.len().saturating_add(found.saturating_mul(new.len())))?;
    Ok(text.replacen(old, new, found))
}

/// `separator.join(items)`
pub(super) fn join(budget: &Budget, items: &Value, separator: &str) -> Result<String, Error> {
    let mut out = String::new();
    for (i, item) in items.try_iter()?.enumerate() {
        let part = to_str(&item, budget.left())?;
        budget.take(part.len() + separator.len())?;
        out.push_str(if i > 0 { separator } else { "" });
        out.push_str(&part);
    }
    Ok(out)
}
