//! `make bench`: measures a server of its own, beside QEMU's own network on the same machine in the same run.
//!
//! `bench [--json FILE] [--only PART,…]` prints what `docs/performance.md` explains. Each part is a module: it takes a
//! server and adds [`report::Figure`]s. `bench traffic` is the other end of the network's measurement, run in a network
//! namespace by the bench itself.

mod calls;
mod commands;
mod creates;
mod files;
mod memory;
mod network;
mod peer;
mod report;
mod traffic;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use report::Report;
use systest::Server;

const USAGE: &str = "usage: bench [--json FILE] [--only memory,creates,commands,files,network,calls]";
const PARTS: [&str; 6] = ["memory", "creates", "commands", "files", "network", "calls"];

/// What to do.
struct Order {
    json: Option<PathBuf>,
    parts: Vec<String>,
}

fn order(mut words: impl Iterator<Item = String>) -> Result<Order> {
    let mut order = Order { json: None, parts: PARTS.map(str::to_owned).to_vec() };
    while let Some(word) = words.next() {
        match (word.as_str(), words.next()) {
            ("--json", Some(file)) => order.json = Some(file.into()),
            ("--only", Some(parts)) => {
                order.parts = parts.split(',').map(str::to_owned).collect();
                if let Some(part) = order.parts.iter().find(|part| !PARTS.contains(&part.as_str())) {
                    bail!("there is no part {part}\n{USAGE}");
                }
            }
            _ => bail!("{USAGE}"),
        }
    }
    Ok(order)
}

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1).peekable();
    let outcome = match words.next_if_eq("traffic") {
        Some(_) => traffic::serve(),
        None => order(words).and_then(measure),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[tokio::main]
async fn measure(order: Order) -> Result<()> {
    let mut report = Report::begin()?;
    for part in &order.parts {
        report.part(part)?;
        // Each part has a server of its own, so that none measures what another has left in it.
        let server = Server::start()?;
        match part.as_str() {
            "memory" => memory::measure(&server, &mut report).await?,
            "creates" => creates::measure(&server, &mut report).await?,
            "commands" => commands::measure(&server, &mut report).await?,
            "files" => files::measure(&server, &mut report).await?,
            "network" => network::measure(&server, &mut report).await?,
            _ => calls::measure(&server, &mut report).await?,
        }
    }
    report.end(order.json.as_deref())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_read() {
        let read = |words: &[&str]| order(words.iter().map(|word| (*word).to_owned()));
        assert_eq!(read(&[]).unwrap().parts.len(), PARTS.len());
        let some = read(&["--only", "files,calls", "--json", "x"]).unwrap();
        assert_eq!(some.parts, ["files", "calls"]);
        assert_eq!(some.json, Some("x".into()));
        assert!(read(&["--only", "nothing"]).is_err());
        assert!(read(&["--json"]).is_err());
    }
}
