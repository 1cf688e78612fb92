//! Filters, order and cursor of `GET /v2/sandboxes` (`e2b-protocol` 2.4): pure functions over the team's sandboxes.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jiff::Timestamp;
use proto::api::{ListedSandbox, State};
use serde::Deserialize;

use crate::error::ApiError;

/// The most a page can hold, and what it holds unless asked otherwise.
pub const PAGE: usize = 100;

/// The query as it comes. Unknown parameters are refused.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ListQuery {
    metadata: Option<String>,
    state: Option<String>,
    order: Option<String>,
    started_after: Option<String>,
    template: Option<String>,
    limit: Option<String>,
    next_token: Option<String>,
}

/// What was asked, checked.
#[derive(Debug)]
pub struct Listing {
    metadata: BTreeMap<String, String>,
    states: Vec<State>,
    ascending: bool,
    started_after: Option<Timestamp>,
    template: Option<String>,
    limit: usize,
    after: Option<Cursor>,
}

/// The last sandbox of the page before.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Cursor {
    started_at: i64,
    id: String,
}

impl TryFrom<ListQuery> for Listing {
    type Error = ApiError;

    fn try_from(query: ListQuery) -> Result<Self, ApiError> {
        let metadata = query.metadata.as_deref().map(parse_metadata).transpose()?.unwrap_or_default();
        let states = match query.state.as_deref() {
            None | Some("") => vec![State::Running, State::Paused],
            Some(list) => list
                .split(',')
                .map(|state| match state {
                    "running" => Ok(State::Running),
                    "paused" => Ok(State::Paused),
                    other => {
                        Err(ApiError::invalid(format!("state: \"{other}\" is neither running nor paused")))
                    }
                })
                .collect::<Result<_, _>>()?,
        };
        let ascending = match query.order.as_deref() {
            None | Some("desc") => false,
            Some("asc") => true,
            Some(other) => {
                return Err(ApiError::invalid(format!("order: \"{other}\" is neither asc nor desc")));
            }
        };
        let started_after = query
            .started_after
            .map(|text| text.parse::<Timestamp>())
            .transpose()
            .map_err(|_| ApiError::invalid("startedAfter: not an RFC 3339 time"))?;
        if query.template.as_deref().is_some_and(|name| name.contains(':')) {
            return Err(ApiError::invalid("template: a filter takes a template's ID or name, without a tag"));
        }
        let limit = match query.limit.as_deref().map(str::parse::<usize>) {
            None => PAGE,
            Some(Ok(limit @ 1..=PAGE)) => limit,
            Some(_) => return Err(ApiError::invalid(format!("limit: must be from 1 to {PAGE}"))),
        };
        let after =
            query.next_token.as_deref().filter(|token| !token.is_empty()).map(Cursor::decode).transpose()?;
        Ok(Self { metadata, states, ascending, started_after, template: query.template, limit, after })
    }
}

/// `k=v&k=v`, escaped twice over: the query's own layer is gone already, one more covers the whole, one each key and
/// value (`e2b-protocol` 2.4, "triple-encoding").
fn parse_metadata(text: &str) -> Result<BTreeMap<String, String>, ApiError> {
    let bad = || ApiError::invalid("metadata: must be key=value pairs joined by &");
    let whole = unescape(text).ok_or_else(bad)?;
    let mut pairs = BTreeMap::new();
    for pair in whole.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').ok_or_else(bad)?;
        pairs.insert(unescape(key).ok_or_else(bad)?, unescape(value).ok_or_else(bad)?);
    }
    Ok(pairs)
}

/// Undoes one layer of form encoding: `+` is a space, `%XX` a byte. None if that is malformed.
fn unescape(text: &str) -> Option<String> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'+' => b' ',
            b'%' => {
                let (high, low) = (bytes.next()?, bytes.next()?);
                let digit = |byte: u8| (byte as char).to_digit(16);
                u8::try_from(digit(high)? * 16 + digit(low)?).ok()?
            }
            other => other,
        });
    }
    String::from_utf8(out).ok()
}

impl Cursor {
    fn of(sandbox: &ListedSandbox) -> Self {
        Self { started_at: sandbox.started_at.as_microsecond(), id: sandbox.sandbox_id.to_string() }
    }

    fn encode(&self) -> String {
        URL_SAFE_NO_PAD.encode(format!("{}__{}", self.started_at, self.id))
    }

    fn decode(token: &str) -> Result<Self, ApiError> {
        let bad = || ApiError::invalid("nextToken: not one that this server gave");
        let bytes = URL_SAFE_NO_PAD.decode(token.trim_end_matches('=')).map_err(|_| bad())?;
        let text = String::from_utf8(bytes).map_err(|_| bad())?;
        let (started_at, id) = text.split_once("__").ok_or_else(bad)?;
        Ok(Self { started_at: started_at.parse().map_err(|_| bad())?, id: id.to_owned() })
    }
}

impl Listing {
    /// The page of `sandboxes` that was asked for, and the token of the next page if there is one.
    pub fn page(&self, sandboxes: Vec<ListedSandbox>) -> (Vec<ListedSandbox>, Option<String>) {
        let mut found: Vec<_> = sandboxes.into_iter().filter(|sandbox| self.wants(sandbox)).collect();
        let key =
            |sandbox: &ListedSandbox| (sandbox.started_at.as_microsecond(), sandbox.sandbox_id.to_string());
        found.sort_by_key(key);
        if !self.ascending {
            found.reverse();
        }
        if let Some(after) = &self.after {
            let after = (after.started_at, after.id.clone());
            found.retain(|sandbox| if self.ascending { key(sandbox) > after } else { key(sandbox) < after });
        }
        let more = found.len() > self.limit;
        found.truncate(self.limit);
        let next = found.last().filter(|_| more).map(|last| Cursor::of(last).encode());
        (found, next)
    }

    fn wants(&self, sandbox: &ListedSandbox) -> bool {
        let has = |(key, value): (&String, &String)| {
            sandbox.metadata.as_ref().and_then(|metadata| metadata.get(key)) == Some(value)
        };
        self.states.contains(&sandbox.state)
            // Inclusive, and by the microsecond: what a client read from a list must find itself.
            && self.started_after.is_none_or(|time| {
                sandbox.started_at.as_microsecond() >= time.as_microsecond()
            })
            && self.template.as_ref().is_none_or(|name| {
                sandbox.template_id == *name || sandbox.alias.as_ref() == Some(name)
            })
            && self.metadata.iter().all(has)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sandbox(second: i64, id: &str, metadata: &[(&str, &str)]) -> ListedSandbox {
        let at = Timestamp::from_second(second).unwrap();
        ListedSandbox {
            template_id: "tpl".to_owned(),
            alias: Some("base".to_owned()),
            sandbox_id: id.parse().unwrap(),
            client_id: "local".to_owned(),
            started_at: at,
            end_at: at,
            cpu_count: 1,
            memory_mb: 512,
            disk_size_mb: 1024,
            metadata: Some(metadata.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()),
            state: State::Running,
            envd_version: "0".to_owned(),
        }
    }

    fn listing(edit: impl FnOnce(&mut ListQuery)) -> Listing {
        let mut query = ListQuery::default();
        edit(&mut query);
        query.try_into().unwrap()
    }

    #[test]
    fn metadata_is_unescaped_as_the_sdk_escapes() {
        // {"a": "b c"} on the wire is a%3Db%252520c; the query's own layer leaves this:
        assert_eq!(parse_metadata("a=b%2520c").unwrap()["a"], "b c");
        assert_eq!(parse_metadata("a%3Db%26c%3Dd").unwrap().len(), 2);
        for bad in ["novalue", "a=%2", "a=%zz", "a=%ff"] {
            assert!(parse_metadata(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn filters_and_together() {
        let all = vec![sandbox(1, "ia", &[("k", "1"), ("x", "y")]), sandbox(2, "ib", &[("k", "1")])];
        let ids = |listing: Listing| -> Vec<String> {
            listing.page(all.clone()).0.iter().map(|s| s.sandbox_id.to_string()).collect()
        };
        assert_eq!(ids(listing(|_| ())), ["ib", "ia"]);
        assert_eq!(ids(listing(|q| q.metadata = Some("k=1&x=y".to_owned()))), ["ia"]);
        assert!(ids(listing(|q| q.metadata = Some("k=2".to_owned()))).is_empty());
        assert!(ids(listing(|q| q.state = Some("paused".to_owned()))).is_empty());
        assert_eq!(ids(listing(|q| q.started_after = Some("1970-01-01T00:00:02Z".to_owned()))), ["ib"]);
        assert!(ids(listing(|q| q.template = Some("other".to_owned()))).is_empty());
    }

    #[test]
    fn bad_parameters_are_named() {
        for (name, value) in
            [("state", "x"), ("order", "x"), ("limit", "0"), ("limit", "101"), ("nextToken", "!")]
        {
            let text = format!("{{\"{name}\": \"{value}\"}}");
            let query: ListQuery = serde_json::from_str(&text).unwrap();
            let error = Listing::try_from(query).unwrap_err();
            assert!(error.message.contains(name), "{}", error.message);
        }
    }

    proptest! {
        #[test]
        fn pages_together_are_the_list(times in proptest::collection::vec(0i64..5, 0..12), limit in 1usize..5, asc: bool) {
            let all: Vec<_> = times.iter().enumerate().map(|(n, t)| sandbox(*t, &format!("i{n}"), &[])).collect();
            let (mut got, mut token) = (Vec::new(), None);
            loop {
                let page = listing(|q| {
                    q.limit = Some(limit.to_string());
                    q.order = Some(if asc { "asc" } else { "desc" }.to_owned());
                    q.next_token = token.clone();
                });
                let (part, next) = page.page(all.clone());
                got.extend(part.iter().map(|s| s.sandbox_id.to_string()));
                match next { Some(next) => token = Some(next), None => break }
            }
            let (whole, _) = listing(|q| q.order = Some(if asc { "asc" } else { "desc" }.to_owned())).page(all);
            let whole: Vec<_> = whole.iter().map(|s| s.sandbox_id.to_string()).collect();
            prop_assert_eq!(got, whole);
        }

        #[test]
        fn no_cursor_breaks_it(token in ".{0,40}") {
            let _ = Cursor::decode(&token);
        }
    }
}
