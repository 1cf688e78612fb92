//! Figures, as aligned text while they come and as JSON at the end.

use std::io::Write;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

/// What was measured: samples of one quantity.
pub(crate) struct Figure {
    name: String,
    unit: &'static str,
    samples: Vec<f64>,
}

impl Figure {
    /// Samples of `name`.
    pub(crate) fn new(name: impl Into<String>, unit: &'static str, samples: Vec<f64>) -> Self {
        Self { name: name.into(), unit, samples }
    }

    /// The value that `part` (0 to 1) of the samples do not exceed.
    pub(crate) fn percentile(&self, part: f64) -> f64 {
        let mut sorted = self.samples.clone();
        sorted.sort_by(f64::total_cmp);
        let rank = (part * sorted.len() as f64).ceil() as usize;
        sorted.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
    }

    fn json(&self) -> Value {
        json!({
            "name": self.name, "unit": self.unit, "samples": self.samples.len(),
            "p50": self.percentile(0.5), "p95": self.percentile(0.95),
            "min": self.percentile(0.0), "max": self.percentile(1.0),
        })
    }
}

/// All figures of a run, and the machine they hold for.
pub(crate) struct Report {
    machine: Value,
    built: jiff::Timestamp,
    parts: Vec<(String, Vec<Figure>)>,
}

impl Report {
    /// Says on which machine this is.
    pub(crate) fn begin() -> Result<Self> {
        let built = built()?;
        let machine = machine(built);
        say("machine")?;
        for (name, value) in machine.as_object().into_iter().flatten() {
            say(&format!("  {name:<13} {}", value.as_str().unwrap_or_default()))?;
        }
        Ok(Self { machine, built, parts: Vec::new() })
    }

    /// Begins a part.
    pub(crate) fn part(&mut self, name: &str) -> Result<()> {
        let load = load();
        say(&format!(
            "\n{:<60} {:>9} {:>9} {:>9} {:>9} {:>5}",
            format!("{name} (load {load})"),
            "p50",
            "p95",
            "min",
            "max",
            "n"
        ))?;
        self.parts.push((name.to_owned(), Vec::new()));
        Ok(())
    }

    /// Shows and keeps a figure.
    pub(crate) fn add(&mut self, figure: Figure) -> Result<()> {
        let columns: Vec<String> =
            [0.5, 0.95, 0.0, 1.0].iter().map(|part| rounded(figure.percentile(*part))).collect();
        let name = format!("{}, {}", figure.name, figure.unit);
        say(&format!(
            "  {name:<58} {:>9} {:>9} {:>9} {:>9} {:>5}",
            columns[0],
            columns[1],
            columns[2],
            columns[3],
            figure.samples.len()
        ))?;
        if let Some((_, figures)) = self.parts.last_mut() {
            figures.push(figure);
        }
        Ok(())
    }

    /// Writes the file, if one is wanted. Figures of two programs are figures of neither.
    pub(crate) fn end(self, file: Option<&Path>) -> Result<()> {
        say(&format!("\nload at the end: {}", load()))?;
        ensure!(
            built()? == self.built,
            "the server was built anew during the run: its figures are of two programs"
        );
        let Some(file) = file else { return Ok(()) };
        let parts: serde_json::Map<String, Value> = self
            .parts
            .iter()
            .map(|(name, figures)| (name.clone(), figures.iter().map(Figure::json).collect()))
            .collect();
        let whole = json!({ "machine": self.machine, "parts": parts, "loadAtEnd": load() });
        let text = serde_json::to_string_pretty(&whole)? + "\n";
        std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
    }
}

/// Three digits are what a shared machine gives.
fn rounded(value: f64) -> String {
    let places = if value.abs() >= 100.0 { 0 } else { 1 + usize::from(value.abs() < 10.0) };
    format!("{value:.places$}")
}

fn say(line: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()?;
    Ok(())
}

fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().unwrap_or_default().to_owned()
}

/// When the server was built. The commit alone does not say what runs.
fn built() -> Result<jiff::Timestamp> {
    let program = systest::program();
    let metadata =
        std::fs::metadata(&program).with_context(|| format!("{} is not there", program.display()))?;
    Ok(metadata.modified()?.try_into()?)
}

fn machine(built: jiff::Timestamp) -> Value {
    let first = |path: &str, name: &str| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_default();
        line.split_once(':').map_or("", |(_, value)| value.trim()).to_owned()
    };
    let said = |words: &[&str]| {
        let output = Command::new(words[0]).args(&words[1..]).output();
        let text =
            output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
        text.lines().next().unwrap_or_default().to_owned()
    };
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    json!({
        "cpu": format!("{cpus} of {}", first("/proc/cpuinfo", "model name")),
        "memory": first("/proc/meminfo", "MemTotal"),
        "kernel": said(&["uname", "-r"]),
        "qemu": said(&["qemu-system-x86_64", "--version"]),
        "server built": built.to_string(),
        "checkout": said(&["git", "-C", &systest::root().display().to_string(), "describe", "--always", "--dirty"]),
        "date": jiff::Timestamp::now().to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples() {
        let figure = Figure::new("x", "ms", (1..=20).rev().map(f64::from).collect());
        assert_eq!(figure.percentile(0.0), 1.0);
        assert_eq!(figure.percentile(0.5), 10.0);
        assert_eq!(figure.percentile(0.95), 19.0);
        assert_eq!(figure.percentile(1.0), 20.0);
        assert!(Figure::new("none", "ms", vec![]).percentile(0.5).is_nan());
    }

    #[test]
    fn three_digits() {
        assert_eq!([1234.5, 99.94, 5.678, 0.1234].map(rounded), ["1234", "99.9", "5.68", "0.12"]);
    }
}
