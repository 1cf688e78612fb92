//! Files into and out of a sandbox, through `/files`.

use std::time::Instant;

use anyhow::{Result, ensure};
use client::http::whole;
use http_body_util::BodyExt;
use systest::Server;

use crate::report::{Figure, Report};

const MIB: usize = 32;
const WARM: usize = 1;
const SAMPLES: usize = 7;
const PATH: &str = "/home/user/bench.bin";

pub(crate) async fn measure(server: &Server, report: &mut Report) -> Result<()> {
    let guest = server.create().await?;
    // Not zeros: nothing on the way may find them easier.
    let content: Vec<u8> =
        (0..MIB << 20).map(|at: usize| (at.wrapping_mul(0x9E37_79B9) >> 13) as u8).collect();
    let content = bytes::Bytes::from(content);
    let (mut up, mut down) = (Vec::new(), Vec::new());
    for sample in 0..WARM + SAMPLES {
        let begun = Instant::now();
        guest.agent.write_file(PATH, whole(content.clone())).await?;
        let uploaded = begun.elapsed();
        let begun = Instant::now();
        let mut body = guest.agent.read_file(PATH).await?.into_body();
        let mut at = 0;
        while let Some(frame) = body.frame().await {
            let frame = frame?;
            let Some(data) = frame.data_ref() else { continue };
            ensure!(content.get(at..at + data.len()) == Some(data), "other bytes came back");
            at += data.len();
        }
        let downloaded = begun.elapsed();
        ensure!(at == content.len(), "{at} bytes came back");
        if sample >= WARM {
            up.push(content.len() as f64 / 1e6 / uploaded.as_secs_f64());
            down.push(content.len() as f64 / 1e6 / downloaded.as_secs_f64());
        }
    }
    report.add(Figure::new(format!("upload of {MIB} MiB"), "MB/s", up))?;
    report.add(Figure::new(format!("download of {MIB} MiB"), "MB/s", down))
}
