//! `GET /metrics`: what the guest uses.

use axum::Json;
use parking_lot::Mutex;
use proto::guest::Metrics;

use super::HttpError;

/// Busy and all ticks of the last sample.
static LAST: Mutex<(u64, u64)> = Mutex::new((0, 0));

/// The first line of `/proc/stat`: ticks in which a CPU was busy, and all ticks.
fn ticks(stat: &str) -> (u64, u64) {
    let mut values =
        stat.lines().next().unwrap_or("").split_whitespace().skip(1).map_while(|v| v.parse().ok());
    // user nice system idle iowait irq softirq steal; guest time is in user already.
    let all: Vec<u64> = values.by_ref().take(8).collect();
    let total = all.iter().sum();
    let idle = all.get(3).unwrap_or(&0) + all.get(4).unwrap_or(&0);
    (total - idle, total)
}

/// A line of `/proc/meminfo`, in bytes.
fn memory(meminfo: &str, key: &str) -> u64 {
    meminfo
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))
        .and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok())
        .unwrap_or(0)
        * 1024
}

/// Takes a sample.
pub(crate) fn sample() -> Metrics {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let (busy, total) = ticks(&stat);
    let (last_busy, last_total) = std::mem::replace(&mut *LAST.lock(), (busy, total));
    let cpu_count = stat.lines().filter(|line| line.starts_with("cpu") && !line.starts_with("cpu ")).count();
    let elapsed = total.saturating_sub(last_total);
    let share = if elapsed == 0 { 0.0 } else { busy.saturating_sub(last_busy) as f32 / elapsed as f32 };
    let mem_total = memory(&meminfo, "MemTotal");
    let mem_cache = memory(&meminfo, "Cached");
    let free = memory(&meminfo, "MemFree") + memory(&meminfo, "Buffers") + memory(&meminfo, "SReclaimable");
    let mem_used = mem_total.saturating_sub(mem_cache).saturating_sub(free);
    let (disk_used, disk_total) = rustix::fs::statvfs("/").map_or((0, 0), |disk| {
        (disk.f_blocks.saturating_sub(disk.f_bfree) * disk.f_frsize, disk.f_blocks * disk.f_frsize)
    });
    Metrics {
        ts: jiff::Timestamp::now().as_second(),
        cpu_count: u32::try_from(cpu_count).unwrap_or(1),
        cpu_used_pct: (share * 100.0 * cpu_count as f32 * 100.0).round() / 100.0,
        mem_total,
        mem_used,
        mem_cache,
        disk_used,
        disk_total,
        mem_total_mib: mem_total >> 20,
        mem_used_mib: mem_used >> 20,
    }
}

/// The route.
pub(crate) async fn metrics() -> Result<Json<Metrics>, HttpError> {
    let taken = tokio::task::spawn_blocking(sample).await;
    taken
        .map(Json)
        .map_err(|_| HttpError::new(http::StatusCode::INTERNAL_SERVER_ERROR, "the sample was not taken"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_leave_out_idle_and_guest_time() {
        assert_eq!(ticks("cpu  10 1 5 100 4 0 1 2 9 9\ncpu0 1"), (19, 123));
        assert_eq!(ticks(""), (0, 0));
    }

    #[test]
    fn memory_lines_are_kibibytes() {
        assert_eq!(memory("MemTotal:  512 kB\nCached: 1 kB\n", "Cached"), 1024);
        assert_eq!(memory("SwapCached: 9 kB\n", "Cached"), 0);
    }
}
