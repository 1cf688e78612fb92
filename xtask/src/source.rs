//! Rules about source files: length, module descriptions, names, where `unsafe` may be, shapes of a noun.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Code lines of a file, without tests, comments and blank lines; may only fall.
const FILE_LINES: usize = 1000;
/// Code lines of a function; may only fall.
const FUNCTION_LINES: usize = 100;
/// Shapes of one noun on its way through the program: wire type, validated spec, device configuration.
const SHAPES: usize = 3;

/// Names that say nothing about what is inside.
const EMPTY_MODULE_NAMES: [&str; 7] = ["util", "utils", "helper", "helpers", "common", "misc", "manager"];
const EMPTY_TYPE_ENDINGS: [&str; 5] = ["Manager", "Helper", "Util", "Utils", "Impl"];
const SHAPE_ENDINGS: [&str; 7] = ["Spec", "Plan", "Config", "Request", "Options", "Params", "Draft"];

pub(crate) fn check(root: &Path) -> Result<Vec<String>> {
    let mut files = Vec::new();
    for dir in ["crates", "systest", "xtask"] {
        collect(&root.join(dir), &mut files)?;
    }
    let mut faults = Vec::new();
    let mut shapes: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for file in &files {
        let text =
            std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        let name = file.strip_prefix(root).unwrap_or(file).display().to_string();
        check_file(&name, &text, &mut faults);
        for (noun, shape) in code(&text).lines().filter_map(shape) {
            shapes.entry(noun).or_default().insert(shape);
        }
    }
    for (noun, shapes) in shapes {
        if shapes.len() > SHAPES {
            let list = shapes.into_iter().collect::<Vec<_>>().join(", ");
            faults.push(format!("{noun} has more than {SHAPES} shapes: {list}"));
        }
    }
    Ok(faults)
}

fn collect(dir: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            if name != "target" && name != "node_modules" {
                collect(&path, files)?;
            }
        } else if name.ends_with(".rs") {
            files.push(path);
        }
    }
    Ok(())
}

/// The text before the unit tests.
fn code(text: &str) -> &str {
    text.find("\n#[cfg(test)]\nmod tests {").map_or(text, |at| &text[..at])
}

fn is_code(line: &str) -> bool {
    let line = line.trim();
    !line.is_empty() && !line.starts_with("//")
}

fn check_file(name: &str, text: &str, faults: &mut Vec<String>) {
    let is_fuzz_target = name.contains("/fuzz_targets/");
    if !text.starts_with("//!") && !is_fuzz_target {
        faults.push(format!("{name}: does not begin with //! (what it owns, what it does not)"));
    }
    let stem = Path::new(name).file_stem().unwrap_or_default().to_string_lossy().into_owned();
    if EMPTY_MODULE_NAMES.contains(&stem.as_str()) {
        faults.push(format!("{name}: the name says nothing about what is inside"));
    }
    let has_unsafe = text.lines().any(|line| line == "#![allow(unsafe_code)]");
    if has_unsafe && stem != "sys" && !name.contains("/sys/") && !name.contains("/vmm/") {
        faults.push(format!("{name}: unsafe code lives in a module named sys"));
    }
    let code = code(text);
    let lines = code.lines().filter(|line| is_code(line)).count();
    if lines > FILE_LINES {
        faults.push(format!("{name}: {lines} code lines, at most {FILE_LINES}"));
    }
    for (function, line, lines) in functions(code) {
        if lines > FUNCTION_LINES {
            faults.push(format!(
                "{name}:{line}: fn {function} has {lines} code lines, at most {FUNCTION_LINES}"
            ));
        }
    }
    for line in code.lines() {
        if let Some(kind) = declared(line, &["struct ", "enum ", "trait "])
            && EMPTY_TYPE_ENDINGS.iter().any(|ending| kind.ends_with(ending))
        {
            faults.push(format!("{name}: the name {kind} says nothing about what it does"));
        }
    }
}

/// The name that a line declares with one of `keywords`.
fn declared(line: &str, keywords: &[&str]) -> Option<String> {
    let line = line.trim_start();
    let line = line.strip_prefix("pub(crate) ").or_else(|| line.strip_prefix("pub(super) ")).unwrap_or(line);
    let line = line.strip_prefix("pub ").unwrap_or(line);
    let rest = keywords.iter().find_map(|keyword| line.strip_prefix(keyword))?;
    let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    (!name.is_empty()).then_some(name)
}

/// Noun and name of a struct that is a shape of it: `NewSandbox`, `SandboxSpec`.
fn shape(line: &str) -> Option<(String, String)> {
    let name = declared(line, &["struct "])?;
    let noun = name
        .strip_prefix("New")
        .or_else(|| SHAPE_ENDINGS.iter().find_map(|ending| name.strip_suffix(ending)))
        .filter(|noun| !noun.is_empty())?;
    Some((noun.to_owned(), name.clone()))
}

/// Name, first line and code lines of each function. A function that rustfmt has formed ends at the first `}` that
/// stands as far in as its `fn`.
fn functions(code: &str) -> Vec<(String, usize, usize)> {
    let lines: Vec<&str> = code.lines().collect();
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let stripped = ["async ", "unsafe ", "const ", "extern \"C\" "].iter().fold(
            line.trim_start()
                .trim_start_matches("pub(crate) ")
                .trim_start_matches("pub(super) ")
                .trim_start_matches("pub ")
                .to_owned(),
            |line, word| line.trim_start_matches(word).to_owned(),
        );
        let Some(name) = declared(&stripped, &["fn "]) else { continue };
        let indent = line.len() - line.trim_start().len();
        let end = format!("{}}}", " ".repeat(indent));
        let length = lines[at..].iter().position(|line| *line == end).unwrap_or(0);
        let count = lines[at..=at + length].iter().filter(|line| is_code(line)).count();
        found.push((name, at + 1, count));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_measured_without_comments() {
        let code = "impl A {\n    pub(crate) async fn f() {\n        // why\n\n        g();\n    }\n}\nfn one() {}\n";
        assert_eq!(functions(code)[0], ("f".to_owned(), 2, 3));
    }

    #[test]
    fn faults_are_found() {
        let mut faults = Vec::new();
        let long = format!("fn f() {{\n{}}}\n", "    g();\n".repeat(101));
        check_file("crates/x/src/utils.rs", &format!("pub struct FooManager;\n{long}"), &mut faults);
        assert_eq!(faults.len(), 4, "{faults:?}");
        faults.clear();
        check_file("crates/x/src/a.rs", "//! A.\n#![allow(unsafe_code)]\n", &mut faults);
        assert_eq!(faults.len(), 1);
    }

    #[test]
    fn shapes_of_a_noun() {
        assert_eq!(shape("pub struct NewSandbox {").unwrap().0, "Sandbox");
        assert_eq!(shape("pub(crate) struct SandboxSpec {").unwrap().0, "Sandbox");
        assert!(shape("struct Config {").is_none());
    }
}
