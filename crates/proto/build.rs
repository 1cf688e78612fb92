//! Generates `proto::rpc` from `proto/*.proto` when the feature `rpc` is on. Needs no `protoc`: protox compiles the
//! files here.

#[cfg(not(feature = "rpc"))]
fn main() {}

#[cfg(feature = "rpc")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    use std::path::PathBuf;

    let files = ["process.proto", "filesystem.proto"];
    for file in files {
        println!("cargo:rerun-if-changed=proto/{file}");
    }
    let mut compiler = protox::Compiler::new(["proto"])?;
    compiler.include_imports(true).include_source_info(true);
    compiler.open_files(files)?;
    let set = PathBuf::from(std::env::var("OUT_DIR")?).join("rpc.fds");
    std::fs::write(&set, compiler.encode_file_descriptor_set())?;
    connectrpc_build::Config::new()
        .descriptor_set(&set)
        .files(&files)
        .include_file("_connectrpc.rs")
        .compile()?;
    Ok(())
}
