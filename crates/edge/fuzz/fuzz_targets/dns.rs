//! DNS messages: the first byte says how many of the rest are the guest's query, the others are the server's answer.
#![no_main]

use edge::egress::{Floor, dns};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((length, data)) = data.split_first() else { return };
    let (query, answer) = data.split_at(usize::from(*length).min(data.len()));
    for why in [dns::Refusal::NoSuchName, dns::Refusal::NoData, dns::Refusal::Failure] {
        let _ = dns::refusal(query, why);
    }
    if let Some(question) = dns::question(query) {
        let _ = dns::judge(&question, question.id, answer, &Floor::default());
        // A query is never an answer.
        assert_eq!(dns::judge(&question, question.id, query, &Floor::default()), dns::Verdict::Foreign);
    }
});
