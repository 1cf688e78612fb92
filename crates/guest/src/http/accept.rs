//! `Accept-Encoding`, as a pure function.

/// How a body may be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Accepted {
    /// gzip was asked for.
    pub(crate) gzip: bool,
    /// Unencoded was not ruled out.
    pub(crate) identity: bool,
}

/// Reads an `Accept-Encoding` header.
pub(crate) fn parse(header: Option<&str>) -> Accepted {
    let (mut gzip, mut identity, mut any) = (None, None, None);
    for item in header.unwrap_or("").split(',') {
        let mut parts = item.split(';');
        let coding = parts.next().unwrap_or("").trim();
        let weight = parts.find_map(|part| part.trim().strip_prefix("q=")?.trim().parse::<f32>().ok());
        let allowed = weight.is_none_or(|weight| weight > 0.0);
        match coding.to_ascii_lowercase().as_str() {
            "gzip" | "x-gzip" => gzip = Some(allowed),
            "identity" => identity = Some(allowed),
            "*" => any = Some(allowed),
            _ => {}
        }
    }
    Accepted {
        gzip: gzip.or(any).unwrap_or(false),
        // Without a word on it, identity is always acceptable.
        identity: identity.unwrap_or(any != Some(false)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encodings() {
        let cases = [
            (None, false, true),
            (Some(""), false, true),
            (Some("gzip"), true, true),
            (Some("gzip, deflate, br"), true, true),
            (Some("GZIP;q=0.5"), true, true),
            (Some("gzip;q=0"), false, true),
            (Some("identity;q=0"), false, false),
            (Some("gzip, identity;q=0"), true, false),
            (Some("*;q=0"), false, false),
            (Some("*"), true, true),
            (Some("br, *;q=0, identity"), false, true),
        ];
        for (header, gzip, identity) in cases {
            assert_eq!(parse(header), Accepted { gzip, identity }, "{header:?}");
        }
    }
}
