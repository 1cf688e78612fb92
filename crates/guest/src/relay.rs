//! The relay: ports that listen only on the guest's loopback, reached from the host (`proto::guest::RELAY_PORT`).
//!
//! Contract: only the gateway is served; the agent's own ports are refused, since a relayed connection would look local.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use proto::guest::{ENVD_PORT, RELAY_OK, RELAY_PORT, RELAY_REFUSED};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::agent::Agent;

/// How long the host may take to name the port.
const NAMING: Duration = Duration::from_secs(5);

/// Serves until the process ends.
pub(crate) async fn serve(agent: Arc<Agent>, listener: TcpListener) {
    loop {
        match listener.accept().await {
            Ok((stream, peer)) if peer.ip() == agent.gateway => {
                tokio::spawn(async move {
                    // An error is a connection that ended; both sides see it.
                    let _ = relay(stream).await;
                });
            }
            Ok(_) => {}
            // Out of descriptors: give connections time to end.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

async fn connect(port: u16) -> Option<TcpStream> {
    if port == ENVD_PORT || port == RELAY_PORT {
        return None;
    }
    let loopback: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    for address in loopback {
        if let Ok(stream) = TcpStream::connect((address, port)).await {
            return Some(stream);
        }
    }
    None
}

async fn relay(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let port = tokio::time::timeout(NAMING, stream.read_u16()).await??;
    let Some(mut target) = connect(port).await else {
        return stream.write_u8(RELAY_REFUSED).await;
    };
    target.set_nodelay(true)?;
    stream.write_u8(RELAY_OK).await?;
    tokio::io::copy_bidirectional(&mut stream, &mut target).await?;
    Ok(())
}
