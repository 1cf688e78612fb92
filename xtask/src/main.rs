//! `cargo xtask lint`: the rules of the house that no other tool checks. CONTRIBUTING.md says why each is there.
//!
//! Everything here works on text that rustfmt has formed; `make check` runs rustfmt first.

mod dependencies;
mod source;

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments != ["lint"] {
        eprintln!("usage: cargo xtask lint");
        return ExitCode::from(2);
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."));
    let faults = dependencies::check(root).and_then(|mut faults| {
        faults.extend(source::check(root)?);
        Ok(faults)
    });
    match faults {
        Ok(faults) if faults.is_empty() => ExitCode::SUCCESS,
        Ok(faults) => {
            for fault in &faults {
                eprintln!("{fault}");
            }
            eprintln!("{} faults", faults.len());
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}
