//! `pando cp`.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use futures::TryStreamExt;
use http_body_util::{BodyExt, StreamBody};
use proto::SandboxId;
use tokio::io::AsyncWriteExt;
use tokio_util::io::ReaderStream;

use crate::output;
use crate::target::Target;

const CHUNK: usize = 256 << 10;

/// Copies a file into or out of a sandbox. `-` is standard input or output.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  pando cp data.csv SANDBOX:/home/user/data.csv\n  \
    pando cp SANDBOX:/home/user/plot.png .\n  tar c src | pando cp - SANDBOX:/tmp/src.tar")]
pub(crate) struct Cp {
    /// A file here, or SANDBOX:PATH
    from: String,
    /// A file here, or SANDBOX:PATH; a relative PATH is under the user's home
    to: String,
}

enum Place {
    Here(PathBuf),
    There(SandboxId, String),
}

fn place(text: &str) -> Place {
    match text.split_once(':') {
        Some((id, path)) if !id.contains(['/', '.']) => match id.parse() {
            Ok(id) => Place::There(id, path.to_owned()),
            Err(_) => Place::Here(text.into()),
        },
        _ => Place::Here(text.into()),
    }
}

impl Cp {
    pub(crate) async fn execute(self, target: &Target) -> Result<u8> {
        let client = target.client()?;
        let agent = async |id: &SandboxId| -> Result<client::envd::Envd> {
            let token = client.get(id).await?.envd_access_token;
            Ok(client.envd(id, token.as_deref())?)
        };
        let bytes = match (place(&self.from), place(&self.to)) {
            (Place::Here(file), Place::There(id, path)) => {
                let path = if path.is_empty() || path.ends_with('/') {
                    let name = file.file_name().context("the file needs a name in the sandbox")?;
                    format!("{path}{}", name.to_string_lossy())
                } else {
                    path
                };
                upload(agent(&id).await?, file, &path).await?
            }
            (Place::There(id, path), Place::Here(file)) => {
                let file = if file.is_dir() {
                    file.join(
                        path.rsplit('/').next().filter(|name| !name.is_empty()).context("that is no file")?,
                    )
                } else {
                    file
                };
                download(agent(&id).await?, &path, file).await?
            }
            _ => bail!("one of the two must be SANDBOX:PATH, the other a file here"),
        };
        if target.json {
            output::json(&serde_json::json!({ "bytes": bytes }))?;
        }
        Ok(0)
    }
}

async fn upload(agent: client::envd::Envd, file: PathBuf, path: &str) -> Result<u64> {
    let counted = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
    let count = counted.clone();
    let reader: Box<dyn tokio::io::AsyncRead + Send + Sync + Unpin> = if file.as_os_str() == "-" {
        Box::new(tokio::io::stdin())
    } else {
        let open = tokio::fs::File::open(&file).await;
        Box::new(open.with_context(|| format!("cannot read {}", file.display()))?)
    };
    let chunks = ReaderStream::with_capacity(reader, CHUNK).map_ok(move |chunk: Bytes| {
        count.fetch_add(chunk.len() as u64, std::sync::atomic::Ordering::Relaxed);
        http_frame(chunk)
    });
    agent.write_file(path, BodyExt::boxed(StreamBody::new(chunks))).await?;
    Ok(counted.load(std::sync::atomic::Ordering::Relaxed))
}

fn http_frame(chunk: Bytes) -> http_body::Frame<Bytes> {
    http_body::Frame::data(chunk)
}

async fn download(agent: client::envd::Envd, path: &str, file: PathBuf) -> Result<u64> {
    let mut body = agent.read_file(path).await?.into_body();
    let mut writer: Box<dyn tokio::io::AsyncWrite + Send + Unpin> = if file.as_os_str() == "-" {
        Box::new(tokio::io::stdout())
    } else {
        let create = tokio::fs::File::create(&file).await;
        Box::new(create.with_context(|| format!("cannot write {}", file.display()))?)
    };
    let mut bytes = 0;
    while let Some(frame) = body.frame().await {
        if let Ok(data) = frame.context("the transfer broke off")?.into_data() {
            bytes += data.len() as u64;
            writer.write_all(&data).await?;
        }
    }
    writer.flush().await?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_told_apart() {
        assert!(matches!(place("iabc:/x"), Place::There(id, path) if id.as_str() == "iabc" && path == "/x"));
        for here in ["file", "./a:b", "/a:b", "-", "Upper:/x"] {
            assert!(matches!(place(here), Place::Here(_)), "{here}");
        }
    }
}
