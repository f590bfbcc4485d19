//! The environment templates run in: jinja2's filters, tests and functions as transformers offers them. Whatever can make
//! much out of little goes through the budget.

use minijinja::value::{from_args, Kwargs, Rest, ValueKind};
use minijinja::{filters, functions, AutoEscape, Environment, Error, State, UndefinedBehavior, Value};

use super::limits::{Budget, MAX_RECURSION};
use super::python::{invalid, to_json, to_str, Dumps};
use super::trust::Table;
use super::{clock, methods, operators};

/// The environment of one rendering. `now`: seconds since 1970 as the clock on the wall shows them.
pub(super) fn environment<'e>(marks: &Table, budget: &Budget, steps: u64, now: i64) -> Environment<'e> {
    let mut env = Environment::empty();
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_recursion_limit(MAX_RECURSION);
    env.set_fuel(Some(steps));
    let own = budget.clone();
    env.set_formatter(move |out, _, value| {
        let text = to_str(value, own.left())?;
        own.take(text.len())?;
        out.write_str(&text).map_err(Error::from)
    });
    let own = budget.clone();
    env.set_unknown_method_callback(move |state, value, method, args| {
        methods::call(&own, state, value, method, args)
    });
    operators::register(&mut env, budget);
    add_tests(&mut env, budget);
    add_filters(&mut env, budget);
    add_functions(&mut env, budget, now);
    let (own, marks) = (budget.clone(), marks.clone());
    env.add_filter("tojson", move |value: Value, args: Rest<Value>| tojson(&own, &marks, &value, &args));
    env
}

fn add_functions(env: &mut Environment, budget: &Budget, now: i64) {
    env.add_function("raise_exception", |message: Value| Err::<Value, _>(invalid(to_str(&message, 4096)?)));
    env.add_function("strftime_now", move |format: &str| clock::strftime(now, format));
    let own = budget.clone();
    let namespace = Value::from_function(functions::namespace);
    env.add_function("namespace", move |state: &State, args: Rest<Value>| {
        own.take_namespace(&args)?;
        namespace.call(state, &args)
    });
    let own = budget.clone();
    env.add_function("range", move |args: Rest<Value>| operators::range(&own, &args));
    let own = budget.clone();
    let dict = Value::from_function(functions::dict);
    env.add_function("dict", move |state: &State, args: Rest<Value>| {
        own.take_nodes(&args)?;
        dict.call(state, &args)
    });
}

fn add_tests(env: &mut Environment, budget: &Budget) {
    macro_rules! tests {
        ($($name:literal $function:ident),* $(,)?) => { $( env.add_test($name, minijinja::tests::$function); )* };
    }
    /// Tests that look at more than a value's type.
    macro_rules! comparisons {
        ($($name:literal $function:ident),* $(,)?) => { $(
            let (own, test) = (budget.clone(), Value::from_function(minijinja::tests::$function));
            env.add_test($name, move |state: &State, args: Rest<Value>| {
                match &args[..] {
                    [a, b] => operators::compared(&own, a, b)?,
                    args => args.iter().try_for_each(|arg| own.read_text(arg))?,
                }
                Ok::<_, Error>(test.call(state, &args)?.is_true())
            });
        )* };
    }
    tests!(
        "defined" is_defined, "undefined" is_undefined, "none" is_none, "boolean" is_boolean, "odd" is_odd, "even" is_even,
        "divisibleby" is_divisibleby, "number" is_number, "integer" is_integer, "float" is_float, "string" is_string,
        "sequence" is_sequence, "iterable" is_iterable, "mapping" is_mapping, "sameas" is_sameas, "true" is_true,
        "false" is_false, "filter" is_filter, "test" is_test,
    );
    comparisons!(
        "lower" is_lower, "upper" is_upper, "eq" is_eq, "equalto" is_eq, "==" is_eq, "ne" is_ne, "!=" is_ne, "lt" is_lt,
        "lessthan" is_lt, "<" is_lt, "le" is_le, "<=" is_le, "gt" is_gt, "greaterthan" is_gt, ">" is_gt, "ge" is_ge,
        ">=" is_ge, "startingwith" is_startingwith, "endingwith" is_endingwith,
    );
    let own = budget.clone();
    env.add_test("in", move |state: &State, item: Value, all: Value| {
        operators::contains(&own, state, &item, &all)
    });
    env.add_test("callable", |value: &Value| {
        value.as_object().is_some() && matches!(value.kind(), ValueKind::Plain)
    });
}

fn add_filters(env: &mut Environment, budget: &Budget) {
    /// Filters of minijinja whose result is no bigger than what goes in; it is taken off the budget.
    macro_rules! filters {
        ($($name:literal $function:ident),* $(,)?) => { $(
            let (own, filter) = (budget.clone(), Value::from_function(filters::$function));
            let orders = matches!($name, "dictsort" | "min" | "max" | "sort" | "groupby" | "unique");
            env.add_filter($name, move |state: &State, args: Rest<Value>| {
                let read = if orders { Budget::read } else { Budget::read_text };
                args.iter().try_for_each(|arg| read(&own, arg))?;
                own.take_value(filter.call(state, &args)?)
            });
        )* };
    }
    filters!(
        "safe" safe, "escape" escape, "e" escape, "lower" lower, "upper" upper, "title" title, "capitalize" capitalize,
        "count" length, "dictsort" dictsort, "items" items, "reverse" reverse, "default" default, "d" default,
        "round" round, "abs" abs, "int" int, "float" float, "attr" attr, "first" first, "last" last, "min" min, "max" max,
        "sort" sort, "list" list, "bool" bool, "sum" sum, "select" select, "reject" reject, "selectattr" selectattr,
        "rejectattr" rejectattr, "map" map, "groupby" groupby, "unique" unique,
    );
    let own = budget.clone();
    env.add_filter("length", move |value: Value| {
        own.read_text(&value)?;
        match value.kind() {
            ValueKind::Undefined => Ok(0),
            kind => value.len().ok_or_else(|| invalid(format!("a value of type {kind} has no length"))),
        }
    });
    let own = budget.clone();
    env.add_filter("string", move |value: Value| {
        let text = to_str(&value, own.left())?;
        own.take(text.len())?;
        Ok::<_, Error>(text)
    });
    let own = budget.clone();
    env.add_filter("trim", move |state: &State, value: Value, args: Rest<Value>| {
        let text = Value::from(to_str(&value, own.left())?);
        methods::call(&own, state, &text, "strip", &args)
    });
    let own = budget.clone();
    env.add_filter("join", move |items: Value, separator: Option<Value>, attribute: Kwargs| {
        let items = match attribute.get::<Option<&str>>("attribute")? {
            Some(name) => items.try_iter()?.map(|item| item.get_attr(name)).collect::<Result<Value, _>>()?,
            None => items,
        };
        attribute.assert_all_used()?;
        let separator = separator.map_or(Ok(String::new()), |separator| to_str(&separator, own.left()))?;
        methods::join(&own, &items, &separator)
    });
    let own = budget.clone();
    env.add_filter("replace", move |value: Value, old: &str, new: &str, count: Option<i64>| {
        methods::replace(&own, &to_str(&value, own.left())?, old, new, count)
    });
    let own = budget.clone();
    env.add_filter("split", move |state: &State, value: Value, args: Rest<Value>| {
        methods::call(&own, state, &value, "split", &args)
    });
    let own = budget.clone();
    env.add_filter("indent", move |value: Value, args: Rest<Value>| indent(&own, &value, &args));
}

/// `indent(width=4, first=False, blank=False)`
fn indent(budget: &Budget, value: &Value, args: &[Value]) -> Result<String, Error> {
    let (width, first, blank, kwargs): (Option<Value>, Option<bool>, Option<bool>, Kwargs) = from_args(args)?;
    let width = width.or(kwargs.get("width")?);
    let first = first.or(kwargs.get("first")?).unwrap_or(false);
    let blank = blank.or(kwargs.get("blank")?).unwrap_or(false);
    kwargs.assert_all_used()?;
    let unit = width.map_or(Ok("    ".to_owned()), |width| indent_unit(budget, &width))?;
    let text = to_str(value, budget.left())?;
    budget.take(text.len().saturating_add(unit.len().saturating_mul(1 + text.matches('\n').count())))?;
    let mut out = String::new();
    for (i, line) in text.split('\n').enumerate() {
        out.push_str(if i > 0 { "\n" } else { "" });
        if if i == 0 { first } else { blank || !line.is_empty() } {
            out.push_str(&unit);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// An indentation given as text or as a number of spaces.
fn indent_unit(budget: &Budget, value: &Value) -> Result<String, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.to_owned());
    }
    let width = usize::try_from(i64::try_from(value.clone())?.max(0)).unwrap_or(usize::MAX);
    budget.take(width)?;
    Ok(" ".repeat(width))
}

/// `tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`, as transformers defines it.
fn tojson(budget: &Budget, marks: &Table, value: &Value, args: &[Value]) -> Result<Value, Error> {
    type Arg = Option<Value>;
    let (ascii, indent, separators, sort, kwargs): (Arg, Arg, Arg, Arg, Kwargs) = from_args(args)?;
    let given = |positional: Arg, name: &str| -> Result<Arg, Error> {
        Ok(positional.or(kwargs.get(name)?).filter(|value| !value.is_none() && !value.is_undefined()))
    };
    let indent = given(indent, "indent")?;
    let mut options = Dumps {
        ensure_ascii: given(ascii, "ensure_ascii")?.is_some_and(|value| value.is_true()),
        sort_keys: given(sort, "sort_keys")?.is_some_and(|value| value.is_true()),
        ..Dumps::default()
    };
    if let Some(indent) = indent {
        let unit = indent_unit(budget, &indent)?;
        if unit.len() > 64 {
            return Err(invalid(format!("tojson indents by at most 64 characters, not {}", unit.len())));
        }
        options.indent = Some(unit);
    }
    if let Some(pair) = given(separators, "separators")? {
        let parts: Vec<Value> = pair.try_iter()?.collect();
        let [Some(item), Some(key)] = [0, 1].map(|at| parts.get(at).and_then(Value::as_str)) else {
            return Err(invalid("tojson takes two separators"));
        };
        options.separators = Some((item.to_owned(), key.to_owned()));
    }
    kwargs.assert_all_used()?;
    let json = to_json(value, &options, marks, budget.left())?;
    budget.take(json.len())?;
    // Safe, so that no escape filter of a template applies to it twice.
    Ok(Value::from_safe_string(json))
}
