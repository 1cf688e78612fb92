//! `Range` and the conditional headers, as pure functions.

use jiff::Timestamp;
use jiff::fmt::rfc2822;

/// What part of a file is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// All of it: no range, or one that is not understood, which HTTP says to ignore. More than one range is also answered
    /// with the whole.
    Whole,
    /// First byte and number of bytes.
    Some(u64, u64),
    /// Beyond the end: 416.
    Unsatisfiable,
}

/// Reads a `Range` header for a file of `size` bytes.
pub(crate) fn parse(header: Option<&str>, size: u64) -> Part {
    let Some(ranges) = header.and_then(|header| header.trim().strip_prefix("bytes=")) else {
        return Part::Whole;
    };
    let Some((first, last)) = ranges.trim().split_once('-') else { return Part::Whole };
    if ranges.contains(',') {
        return Part::Whole;
    }
    let (first, last) = (first.trim(), last.trim());
    if first.is_empty() {
        return match last.parse::<u64>() {
            Ok(0) => Part::Unsatisfiable,
            Ok(_) if size == 0 => Part::Unsatisfiable,
            Ok(count) => Part::Some(size - count.min(size), count.min(size)),
            Err(_) => Part::Whole,
        };
    }
    let Ok(first) = first.parse::<u64>() else { return Part::Whole };
    let last = if last.is_empty() { u64::MAX } else { last.parse().unwrap_or(0) };
    if last < first {
        return Part::Whole;
    }
    if first >= size {
        return Part::Unsatisfiable;
    }
    Part::Some(first, last.min(size - 1) - first + 1)
}

/// A time as HTTP writes it.
pub(crate) fn http_date(time: Timestamp) -> Option<String> {
    rfc2822::DateTimePrinter::new().timestamp_to_rfc9110_string(&time).ok()
}

/// Reads a time as HTTP writes it.
pub(crate) fn parse_http_date(text: &str) -> Option<Timestamp> {
    rfc2822::DateTimeParser::new().parse_timestamp(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges() {
        let cases = [
            (None, Part::Whole),
            (Some("bytes=0-0"), Part::Some(0, 1)),
            (Some("bytes=2-4"), Part::Some(2, 3)),
            (Some("bytes=2-"), Part::Some(2, 8)),
            (Some("bytes=2-999"), Part::Some(2, 8)),
            (Some("bytes=-3"), Part::Some(7, 3)),
            (Some("bytes=-30"), Part::Some(0, 10)),
            (Some("bytes=-0"), Part::Unsatisfiable),
            (Some("bytes=10-"), Part::Unsatisfiable),
            (Some("bytes=5-4"), Part::Whole),
            (Some("bytes=0-1,3-4"), Part::Whole),
            (Some("bytes=a-b"), Part::Whole),
            (Some("bytes=-"), Part::Whole),
            (Some("lines=1-2"), Part::Whole),
        ];
        for (header, expected) in cases {
            assert_eq!(parse(header, 10), expected, "{header:?}");
        }
        assert_eq!(parse(Some("bytes=-1"), 0), Part::Unsatisfiable);
        assert_eq!(parse(Some("bytes=0-18446744073709551615"), 10), Part::Some(0, 10));
    }

    #[test]
    fn dates_survive_a_round_trip() {
        let text = "Sun, 06 Nov 1994 08:49:37 GMT";
        assert_eq!(http_date(parse_http_date(text).unwrap()).as_deref(), Some(text));
        assert!(parse_http_date("yesterday").is_none());
    }
}
