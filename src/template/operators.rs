//! Python's operators and literals, for those that [`super::limits::guard`] exchanged: each takes what it makes or looks at off
//! the budget first.

use minijinja::value::{from_args, ValueKind};
use minijinja::{tests, Environment, Error, ErrorKind, State, Value};

use super::limits::Budget;
use super::python::{invalid, to_str};

/// Registers the operators under names that no template can write.
pub(super) fn register(env: &mut Environment, budget: &Budget) {
    let own = budget.clone();
    env.add_function("+", move |a: Value, b: Value| add(&own, &a, &b));
    let own = budget.clone();
    env.add_function("*", move |a: Value, b: Value| multiply(&own, &a, &b));
    let own = budget.clone();
    env.add_function("~", move |a: Value, b: Value| concat(&own, &a, &b));
    let own = budget.clone();
    env.add_function("[:]", move |v: Value, start: Value, stop: Value, step: Value| {
        slice(&own, &v, [start, stop, step])
    });
    let own = budget.clone();
    env.add_function("[.]", move |value: Value, key: Value| item(&own, &value, &key));
    let own = budget.clone();
    env.add_function("in", move |state: &State, item: Value, all: Value| contains(&own, state, &item, &all));
    for (name, compare) in COMPARISONS {
        let own = budget.clone();
        env.add_function(name, move |a: Value, b: Value| {
            compared(&own, &a, &b)?;
            Ok::<_, Error>(compare(&a, &b))
        });
    }
    let own = budget.clone();
    env.add_function("[]", move |items: minijinja::value::Rest<Value>| {
        own.take_nodes(&items)?;
        Ok::<_, Error>(Value::from(items.0))
    });
    let own = budget.clone();
    env.add_function("{}", move |items: minijinja::value::Rest<Value>| {
        own.take_nodes(&items)?;
        Ok::<_, Error>(
            items.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone())).collect::<Value>(),
        )
    });
}

type Compare = fn(&Value, &Value) -> bool;

const COMPARISONS: [(&str, Compare); 6] = [
    ("==", |a, b| a == b),
    ("!=", |a, b| a != b),
    ("<", |a, b| a < b),
    ("<=", |a, b| a <= b),
    (">", |a, b| a > b),
    (">=", |a, b| a >= b),
];

/// Takes what comparing two values costs: nothing where their types differ.
pub(super) fn compared(budget: &Budget, a: &Value, b: &Value) -> Result<(), Error> {
    match (a.as_str(), b.as_str()) {
        (Some(left), Some(right)) => budget.read_text(if left.len() < right.len() { a } else { b }),
        _ if a.as_object().is_some() && b.as_object().is_some() => {
            budget.read(a)?;
            budget.read(b)
        }
        _ => Ok(()),
    }
}

/// `item in all`
pub(super) fn contains(budget: &Budget, state: &State, item: &Value, all: &Value) -> Result<bool, Error> {
    budget.read(item)?;
    match all.kind() {
        ValueKind::Undefined | ValueKind::Map => {}
        ValueKind::String | ValueKind::Seq | ValueKind::Iterable => budget.read(all)?,
        kind => return Err(invalid(format!("a value of type {kind} contains nothing"))),
    }
    tests::is_in(state, item, all)
}

/// `value[key]`
fn item(budget: &Budget, value: &Value, key: &Value) -> Result<Value, Error> {
    if value.is_undefined() {
        return Err(Error::from(ErrorKind::UndefinedError));
    }
    budget.read(key)?;
    value.get_item(key)
}

fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

/// A number; booleans count as in Python.
enum Number {
    Int(i128),
    Float(f64),
}

impl Number {
    fn of(value: &Value) -> Option<Number> {
        match value.kind() {
            ValueKind::Bool => Some(Number::Int(value.is_true().into())),
            ValueKind::Number if value.is_integer() => i128::try_from(value.clone()).ok().map(Number::Int),
            ValueKind::Number => f64::try_from(value.clone()).ok().map(Number::Float),
            _ => None,
        }
    }

    fn float(&self) -> f64 {
        match self {
            Number::Int(n) => *n as f64,
            Number::Float(x) => *x,
        }
    }
}

fn integer(n: Option<i128>) -> Result<Value, Error> {
    let n = n.ok_or_else(|| invalid("an integer overflows"))?;
    Ok(i64::try_from(n).map_or_else(|_| Value::from(n), Value::from))
}

fn add(budget: &Budget, a: &Value, b: &Value) -> Result<Value, Error> {
    if let (Some(left), Some(right)) = (a.as_str(), b.as_str()) {
        budget.take(left.len() + right.len())?;
        return Ok(Value::from([left, right].concat()));
    }
    if is_list(a) && is_list(b) {
        let len = a.len().unwrap_or(0).saturating_add(b.len().unwrap_or(0));
        budget.take(len.saturating_mul(size_of::<Value>()))?;
        return Ok(Value::from(a.try_iter()?.chain(b.try_iter()?).collect::<Vec<_>>()));
    }
    match (Number::of(a), Number::of(b)) {
        (Some(Number::Int(x)), Some(Number::Int(y))) => integer(x.checked_add(y)),
        (Some(x), Some(y)) => Ok(Value::from(x.float() + y.float())),
        _ if a.as_str().is_some() => {
            Err(invalid(format!("can only concatenate a string to a string, not {}", b.kind())))
        }
        _ => Err(invalid(format!("values of type {} and {} cannot be added", a.kind(), b.kind()))),
    }
}

fn multiply(budget: &Budget, a: &Value, b: &Value) -> Result<Value, Error> {
    for (value, times) in [(a, b), (b, a)] {
        let list = is_list(value);
        if !list && value.as_str().is_none() {
            continue;
        }
        let Some(Number::Int(times)) = Number::of(times) else {
            return Err(invalid(format!(
                "a {} can only be multiplied by an integer, not {}",
                value.kind(),
                times.kind()
            )));
        };
        let times = usize::try_from(times.max(0)).unwrap_or(usize::MAX);
        if let Some(text) = value.as_str() {
            budget.take(text.len().saturating_mul(times))?;
            return Ok(Value::from(text.repeat(times)));
        }
        let items: Vec<Value> = value.try_iter()?.collect();
        budget.take(items.len().saturating_mul(times).saturating_mul(size_of::<Value>()))?;
        let copies = std::iter::repeat_n(&items, if items.is_empty() { 0 } else { times });
        return Ok(copies.flatten().cloned().collect());
    }
    match (Number::of(a), Number::of(b)) {
        (Some(Number::Int(x)), Some(Number::Int(y))) => integer(x.checked_mul(y)),
        (Some(x), Some(y)) => Ok(Value::from(x.float() * y.float())),
        _ => Err(invalid(format!("values of type {} and {} cannot be multiplied", a.kind(), b.kind()))),
    }
}

fn concat(budget: &Budget, a: &Value, b: &Value) -> Result<Value, Error> {
    let mut text = to_str(a, budget.left())?;
    text.push_str(&to_str(b, budget.left())?);
    budget.take(text.len())?;
    Ok(Value::from(text))
}

/// `value[start:stop:step]` as Python counts it, over characters or items.
fn slice(budget: &Budget, value: &Value, bounds: [Value; 3]) -> Result<Value, Error> {
    let bound = |value: &Value| match value.kind() {
        ValueKind::None | ValueKind::Undefined => Ok(None),
        _ => i64::try_from(value.clone()).map(Some),
    };
    let [start, stop, step] = [bound(&bounds[0])?, bound(&bounds[1])?, bound(&bounds[2])?];
    if let Some(text) = value.as_str() {
        budget.take(text.len())?;
        let chars: Vec<char> = text.chars().collect();
        let kept = indices(chars.len(), start, stop, step)?.into_iter().map(|at| chars[at]);
        return Ok(Value::from(kept.collect::<String>()));
    }
    if !is_list(value) {
        return Err(invalid(format!("a value of type {} cannot be sliced", value.kind())));
    }
    let items: Vec<Value> = value.try_iter()?.collect();
    budget.take(items.len().saturating_mul(size_of::<Value>()))?;
    let kept = indices(items.len(), start, stop, step)?.into_iter().map(|at| items[at].clone());
    Ok(Value::from(kept.collect::<Vec<_>>()))
}

/// `range(*slice(start, stop, step).indices(len))`
fn indices(
    len: usize,
    start: Option<i64>,
    stop: Option<i64>,
    step: Option<i64>,
) -> Result<Vec<usize>, Error> {
    let step = step.unwrap_or(1);
    if step == 0 {
        return Err(invalid("a slice cannot have a step of 0"));
    }
    let len = len as i64;
    let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let clamp = |at: i64| (if at < 0 { at.saturating_add(len) } else { at }).clamp(low, high);
    let start = start.map_or(if step > 0 { low } else { high }, clamp);
    let stop = stop.map_or(if step > 0 { high } else { low }, clamp);
    let mut kept = Vec::new();
    let mut at = start;
    while if step > 0 { at < stop } else { at > stop } {
        kept.push(at as usize);
        at = at.saturating_add(step);
    }
    Ok(kept)
}

/// `range(…)` with at most 10,000 numbers.
pub(super) fn range(budget: &Budget, args: &[Value]) -> Result<Value, Error> {
    const MAX: i64 = 10_000;
    let (first, second, step): (i64, Option<i64>, Option<i64>) = from_args(args)?;
    let (start, stop) = second.map_or((0, first), |stop| (first, stop));
    let step = step.unwrap_or(1);
    let mut numbers = Vec::new();
    let mut at = start;
    while step != 0 && if step > 0 { at < stop } else { at > stop } {
        if numbers.len() as i64 >= MAX {
            return Err(invalid(format!("a range of more than {MAX} numbers")));
        }
        numbers.push(Value::from(at));
        at = at.saturating_add(step);
    }
    if step == 0 {
        return Err(invalid("a range cannot have a step of 0"));
    }
    budget.take(numbers.len() * size_of::<Value>())?;
    Ok(Value::from(numbers))
}
