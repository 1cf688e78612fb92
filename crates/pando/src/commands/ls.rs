//! `pando ls` and `pando template ls`.

use anyhow::Result;

use crate::output;
use crate::target::Target;

/// Lists the running sandboxes, newest first.
pub(crate) async fn sandboxes(target: &Target) -> Result<u8> {
    let sandboxes = target.client()?.list().await?;
    if target.json {
        output::json(&sandboxes)?;
        return Ok(0);
    }
    let rows: Vec<Vec<String>> = sandboxes
        .iter()
        .map(|sandbox| {
            vec![
                sandbox.sandbox_id.to_string(),
                sandbox.alias.clone().unwrap_or_else(|| sandbox.template_id.clone()),
                sandbox.started_at.strftime("%Y-%m-%d %H:%M:%SZ").to_string(),
                left(sandbox.end_at),
                format!("{} vCPU {} MiB", sandbox.cpu_count, sandbox.memory_mb),
                metadata(sandbox.metadata.as_ref()),
            ]
        })
        .collect();
    output::table(&["SANDBOX", "TEMPLATE", "STARTED", "TIME LEFT", "SIZE", "METADATA"], &rows)?;
    Ok(0)
}

fn left(end_at: jiff::Timestamp) -> String {
    let seconds = end_at.duration_since(jiff::Timestamp::now()).as_secs().max(0);
    match seconds {
        0..=119 => format!("{seconds} s"),
        120..=7199 => format!("{} min", seconds / 60),
        _ => format!("{} h", seconds / 3600),
    }
}

fn metadata(pairs: Option<&std::collections::BTreeMap<String, String>>) -> String {
    let pairs = pairs.into_iter().flatten().map(|(key, value)| format!("{key}={value}"));
    pairs.collect::<Vec<_>>().join(" ")
}

/// Lists the templates.
pub(crate) async fn templates(target: &Target) -> Result<u8> {
    let templates = target.client()?.templates().await?;
    if target.json {
        output::json(&templates)?;
        return Ok(0);
    }
    let rows: Vec<Vec<String>> = templates
        .iter()
        .map(|template| {
            vec![
                template.aliases.join(","),
                template.template_id.clone(),
                format!("{} vCPU {} MiB", template.cpu_count, template.memory_mb),
                format!("{} MiB", template.bytes >> 20),
                template.created_at.strftime("%Y-%m-%d %H:%M:%SZ").to_string(),
            ]
        })
        .collect();
    output::table(&["NAME", "TEMPLATE", "SIZE", "ON DISK", "BUILT"], &rows)?;
    Ok(0)
}
