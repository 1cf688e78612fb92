//! DNS messages: reading questions, judging answers, building refusals.
//!
//! Owns: pure functions on bytes of the guest and of name servers, both hostile. Does not own: sockets and fail-over
//! ([`super::resolver`]).

use hickory_proto::op::{Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::svcb::SvcParamValue;
use hickory_proto::rr::{RData, RecordType};

use super::Floor;

/// The port of DNS.
pub const PORT: u16 = 53;

/// The one question of a query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// The identifier the guest chose.
    pub id: u16,
    query: Query,
}

impl Question {
    /// Whether IPv6 addresses are asked for. The link carries no IPv6, so there are none: the answer is empty, and
    /// programs go on with IPv4 at once.
    pub fn wants_ipv6(&self) -> bool {
        self.query.query_type() == RecordType::AAAA
    }
}

/// Reads a query. `None` unless it is a standard query with one question.
pub fn question(message: &[u8]) -> Option<Question> {
    let message = Message::from_vec(message).ok()?;
    let standard =
        message.metadata.message_type == MessageType::Query && message.metadata.op_code == OpCode::Query;
    match <[Query; 1]>::try_from(message.queries) {
        Ok([query]) if standard => Some(Question { id: message.metadata.id, query }),
        _ => None,
    }
}

/// What a query is answered with when it is not forwarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The name does not exist (NXDOMAIN).
    NoSuchName,
    /// The name has no such record.
    NoData,
    /// No name server gave an answer.
    Failure,
}

/// Builds that answer to `query`. `None` when `query` is not one.
pub fn refusal(query: &[u8], why: Refusal) -> Option<Vec<u8>> {
    let query = Message::from_vec(query).ok()?;
    if query.metadata.message_type != MessageType::Query {
        return None;
    }
    let mut answer = Message::response(query.metadata.id, query.metadata.op_code);
    answer.metadata.recursion_desired = query.metadata.recursion_desired;
    answer.metadata.recursion_available = true;
    answer.metadata.response_code = match why {
        Refusal::NoSuchName => ResponseCode::NXDomain,
        Refusal::NoData => ResponseCode::NoError,
        Refusal::Failure => ResponseCode::ServFail,
    };
    answer.queries = query.queries;
    answer.to_vec().ok()
}

/// A judgement on what came back from a name server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Pass it on.
    Good,
    /// It is no answer to this question: ignore it and wait on.
    Foreign,
    /// The server could or would not answer; another may.
    Unwilling,
    /// It leads to an address under the floor (DNS rebinding): the name does not exist.
    Floor,
}

/// Judges `answer` to `question`, which was sent with the identifier `id`.
pub fn judge(question: &Question, id: u16, answer: &[u8], floor: &Floor) -> Verdict {
    let Ok(answer) = Message::from_vec(answer) else { return Verdict::Foreign };
    let reply = answer.metadata.message_type == MessageType::Response && answer.metadata.id == id;
    // Servers that refuse may leave the question out.
    let asked = answer.queries.is_empty() && answer.metadata.response_code != ResponseCode::NoError;
    if !reply || !(asked || answer.queries == [question.query.clone()]) {
        return Verdict::Foreign;
    }
    if answer.all_sections().any(|record| leads_below(&record.data, floor)) {
        return Verdict::Floor;
    }
    match answer.metadata.response_code {
        ResponseCode::NoError | ResponseCode::NXDomain => Verdict::Good,
        _ => Verdict::Unwilling,
    }
}

/// Whether a record names an address under the floor.
fn leads_below(data: &RData, floor: &Floor) -> bool {
    match data {
        RData::HTTPS(https) => hints_below(&https.0.svc_params, floor),
        RData::SVCB(svcb) => hints_below(&svcb.svc_params, floor),
        data => data.ip_addr().is_some_and(|address| floor.covers(address).is_some()),
    }
}

fn hints_below<K>(params: &[(K, SvcParamValue)], floor: &Floor) -> bool {
    params.iter().any(|(_, value)| match value {
        SvcParamValue::Ipv4Hint(hint) => hint.0.iter().any(|a| floor.covers(a.0.into()).is_some()),
        SvcParamValue::Ipv6Hint(hint) => hint.0.iter().any(|a| floor.covers(a.0.into()).is_some()),
        _ => false,
    })
}

/// Replaces a message's identifier.
pub fn set_id(message: &mut [u8], id: u16) {
    if let Some(place) = message.first_chunk_mut() {
        *place = id.to_be_bytes();
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::str::FromStr;

    use hickory_proto::rr::rdata::A;
    use hickory_proto::rr::{Name, Record};
    use proptest::prelude::*;

    use super::*;

    fn query(name: &str, id: u16) -> Message {
        let mut message = Message::new(id, MessageType::Query, OpCode::Query);
        message.add_query(Query::query(Name::from_str(name).unwrap(), RecordType::A));
        message
    }

    fn answer(name: &str, id: u16, address: [u8; 4]) -> Vec<u8> {
        let mut message = query(name, id);
        message.metadata.message_type = MessageType::Response;
        let data = RData::A(A(Ipv4Addr::from(address)));
        message.add_answer(Record::from_rdata(Name::from_str(name).unwrap(), 60, data));
        message.to_vec().unwrap()
    }

    #[test]
    fn answers_are_matched_by_identifier_and_question() {
        let asked = question(&query("ok.test.", 7).to_vec().unwrap()).unwrap();
        let floor = Floor::default();
        assert_eq!(judge(&asked, 9, &answer("ok.test.", 9, [1, 1, 1, 1]), &floor), Verdict::Good);
        assert_eq!(judge(&asked, 9, &answer("ok.test.", 8, [1, 1, 1, 1]), &floor), Verdict::Foreign);
        assert_eq!(judge(&asked, 9, &answer("other.test.", 9, [1, 1, 1, 1]), &floor), Verdict::Foreign);
        assert_eq!(judge(&asked, 9, &query("ok.test.", 9).to_vec().unwrap(), &floor), Verdict::Foreign);
        assert_eq!(judge(&asked, 9, &answer("ok.test.", 9, [169, 254, 169, 254]), &floor), Verdict::Floor);
    }

    #[test]
    fn a_refusal_repeats_the_question() {
        let asked = query("no.test.", 7);
        let refused =
            Message::from_vec(&refusal(&asked.to_vec().unwrap(), Refusal::NoSuchName).unwrap()).unwrap();
        assert_eq!(refused.metadata.response_code, ResponseCode::NXDomain);
        assert_eq!(refused.metadata.id, 7);
        assert_eq!(refused.queries, asked.queries);
        assert_eq!(refusal(&answer("no.test.", 7, [1, 1, 1, 1]), Refusal::NoSuchName), None);
    }

    proptest! {
        #[test]
        fn no_parser_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = question(&bytes);
            let _ = refusal(&bytes, Refusal::Failure);
            let asked = question(&query("ok.test.", 7).to_vec().unwrap()).unwrap();
            let _ = judge(&asked, 7, &bytes, &Floor::default());
        }

        #[test]
        fn broken_answers_do_not_panic(at in 0usize..40, value: u8, cut in 0usize..60) {
            let mut bytes = answer("ok.test.", 7, [1, 1, 1, 1]);
            let length = bytes.len();
            bytes[at % length] = value;
            bytes.truncate(length.saturating_sub(cut));
            let asked = question(&query("ok.test.", 7).to_vec().unwrap()).unwrap();
            let _ = judge(&asked, 7, &bytes, &Floor::default());
        }
    }
}
