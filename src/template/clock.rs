//! `strftime_now` of transformers: the date, as templates put it into the system message.

use minijinja::Error;

use super::python::invalid;

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Seconds since 1970 in UTC.
pub(super) fn utc() -> i64 {
    let elapsed = web_time::SystemTime::now().duration_since(web_time::UNIX_EPOCH);
    elapsed.map_or(0, |elapsed| elapsed.as_secs() as i64)
}

/// `datetime.strftime(format)` in the C locale; `seconds` since 1970 as the clock on the wall shows them.
pub(super) fn strftime(seconds: i64, format: &str) -> Result<String, Error> {
    let (day, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (year, month, date) = civil(day);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let week_day = (day + 4).rem_euclid(7) as usize;
    let day_of_year = day - days_before(year) + 1;
    let hour12 = (hour + 11) % 12 + 1;
    let month_name = MONTHS[month as usize - 1];
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut code = chars.next();
        let bare = code == Some('-');
        if bare {
            code = chars.next();
        }
        let two = |n: i64| if bare { n.to_string() } else { format!("{n:02}") };
        match code {
            Some('Y') => out.push_str(&format!("{year:04}")),
            Some('y') => out.push_str(&two(year.rem_euclid(100))),
            Some('m') => out.push_str(&two(month)),
            Some('d') => out.push_str(&two(date)),
            Some('e') => out.push_str(&format!("{date:2}")),
            Some('H') => out.push_str(&two(hour)),
            Some('I') => out.push_str(&two(hour12)),
            Some('M') => out.push_str(&two(minute)),
            Some('S') => out.push_str(&two(second)),
            Some('j') if bare => out.push_str(&day_of_year.to_string()),
            Some('j') => out.push_str(&format!("{day_of_year:03}")),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('A') => out.push_str(DAYS[week_day]),
            Some('a') => out.push_str(&DAYS[week_day][..3]),
            Some('w') => out.push_str(&week_day.to_string()),
            Some('B') => out.push_str(month_name),
            Some('b' | 'h') => out.push_str(&month_name[..3]),
            Some('F') => out.push_str(&format!("{year:04}-{month:02}-{date:02}")),
            Some('T') => out.push_str(&format!("{hour:02}:{minute:02}:{second:02}")),
            Some('D') => out.push_str(&format!("{month:02}/{date:02}/{:02}", year.rem_euclid(100))),
            Some('s') => out.push_str(&seconds.to_string()),
            Some('%') => out.push('%'),
            // A naive datetime has no zone.
            Some('Z' | 'z') => {}
            other => return Err(invalid(format!("strftime_now does not know the code {other:?}"))),
        }
    }
    Ok(out)
}

/// Days from 1970 to the first of January of a year, Gregorian.
fn days_before(year: i64) -> i64 {
    let y = year - 1;
    365 * y + y.div_euclid(4) - y.div_euclid(100) + y.div_euclid(400) - 719_162
}

/// Year, month (1–12) and date of a day counted from 1970.
fn civil(day: i64) -> (i64, i64, i64) {
    let mut year = 1970 + day.div_euclid(366);
    while days_before(year + 1) <= day {
        year += 1;
    }
    let leap = days_before(year + 1) - days_before(year) - 365;
    let mut rest = day - days_before(year);
    let mut month = 1;
    for length in [31, 28 + leap, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if rest < length {
            break;
        }
        rest -= length;
        month += 1;
    }
    (year, month.min(12), rest + 1)
}
