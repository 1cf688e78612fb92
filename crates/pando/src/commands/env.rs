//! `pando env`.

use anyhow::Result;

use crate::output;
use crate::target::Target;

/// Prints what `eval` makes into the environment of the SDKs (`e2b-protocol` 1.1).
pub(crate) fn execute(target: &Target) -> Result<u8> {
    let (url, key) = (target.url(), target.key()?);
    let variables = [("E2B_API_KEY", key.expose()), ("E2B_API_URL", &url), ("E2B_SANDBOX_URL", &url)];
    if target.json {
        let map: std::collections::BTreeMap<_, _> = variables.into_iter().collect();
        output::json(&map)?;
        return Ok(0);
    }
    for (name, value) in variables {
        output::line(&format!("export {name}={}", quoted(value)))?;
    }
    Ok(0)
}

/// A value as a shell reads it.
fn quoted(value: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-./:".contains(&byte);
    if value.bytes().all(plain) { value.to_owned() } else { format!("'{}'", value.replace('\'', r"'\''")) }
}
