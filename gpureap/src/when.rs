//! Points in time as people give them. Always UTC, as all output is.

use jiff::{
    SignedDuration, Timestamp,
    civil::{Date, DateTime, Time},
    tz::TimeZone,
};

use crate::config::duration;

/// `2026-12-01T01:02:03Z`, `2026-12-01 01:02`, `2026-12-01`, `01:02` (of today, or of yesterday where today's is to come),
/// `90s`, `1h` (ago), `now`.
pub fn parse(text: &str, now: Timestamp) -> Result<Timestamp, String> {
    let text = text.trim();
    let plain = text.strip_suffix("ago").map_or(text, str::trim_end);
    if text == "now" {
        return Ok(now);
    }
    if let Ok(time) = text.parse::<Timestamp>() {
        return Ok(time);
    }
    let utc = |time: DateTime| time.to_zoned(TimeZone::UTC).map(|zoned| zoned.timestamp()).map_err(|_| wrong(text));
    if let Ok(time) = text.parse::<DateTime>() {
        return utc(time);
    }
    if let Ok(date) = text.parse::<Date>() {
        return utc(date.to_datetime(Time::midnight()));
    }
    if text.contains(':')
        && let Ok(time) = text.parse::<Time>()
    {
        let today = utc(now.to_zoned(TimeZone::UTC).date().to_datetime(time))?;
        return Ok(if today > now { today - SignedDuration::from_hours(24) } else { today });
    }
    // A bare number could be anything.
    if !plain.is_empty()
        && !plain.bytes().all(|byte| byte.is_ascii_digit())
        && let Ok(ago) = duration(plain)
        && let Ok(ago) = SignedDuration::try_from(ago)
        && let Ok(time) = now.checked_sub(ago)
    {
        return Ok(time);
    }
    Err(wrong(text))
}

fn wrong(text: &str) -> String {
    format!("`{text}` is not a time such as 2026-12-01T01:02:03Z, \"2026-12-01 01:02\", 01:02 (UTC) or 1h (ago)")
}

/// By the clock of this moment.
pub fn parse_now(text: &str) -> Result<Timestamp, String> {
    parse(text, Timestamp::now())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        let now: Timestamp = "2026-12-01T12:00:00Z".parse().unwrap();
        for (text, expected) in [
            ("2026-11-30T01:02:03Z", "2026-11-30T01:02:03Z"),
            ("2026-11-30T02:02:03+01:00", "2026-11-30T01:02:03Z"),
            ("2026-11-30 01:02", "2026-11-30T01:02:00Z"),
            ("2026-11-30T01:02:03.5", "2026-11-30T01:02:03.5Z"),
            ("2026-11-30", "2026-11-30T00:00:00Z"),
            ("01:02", "2026-12-01T01:02:00Z"),
            ("23:59:58", "2026-11-30T23:59:58Z"),
            ("1h", "2026-12-01T11:00:00Z"),
            ("90s", "2026-12-01T11:58:30Z"),
            ("2d ago", "2026-11-29T12:00:00Z"),
            (" now ", "2026-12-01T12:00:00Z"),
        ] {
            assert_eq!(parse(text, now).map(|time| time.to_string()), Ok(expected.to_owned()), "{text}");
        }
        for text in ["", "ago", "7", "-1h", "soon", "25:00", "2026-13-01", "9999999999999d"] {
            assert!(parse(text, now).is_err(), "{text}");
        }
    }
}
