//! `pando setup`: kernel, initramfs, root disk, template. Each is made only when it is missing or no longer fits what
//! it is made from.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use node::machine::Driver;
use proto::manifest::GuestDefaults;
use store::layout::DataDir;
use store::template::Template;

use crate::config::Config;
use crate::output;
use crate::target::Target;

const STEPS: u64 = 5;
const BASE: &str = "base";

/// Makes what sandboxes are made from.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  pando setup --data-dir /var/lib/pando\n\nNeeds root, and about 3 GB in the data \
    directory. Fetches a kernel and packages from the Debian mirror that apt uses."
)]
pub(crate) struct Setup {
    /// Make everything anew
    #[arg(long)]
    rebuild: bool,
    /// Kernel to use instead of Debian's: a vmlinux or an LZ4-compressed bzImage with virtio-mmio built in
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
    /// Machine driver that the template is for; `serve` must use the same
    #[arg(long, value_enum, default_value_t = super::serve::Machine::Auto)]
    machine: super::serve::Machine,
    /// Configuration file
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

impl Setup {
    pub(crate) async fn execute(self, target: &Target) -> Result<u8> {
        super::serve::require_root("setup")?;
        let config = Config::load(self.config.as_deref())?;
        let data = DataDir::open(&target.data_dir)?;
        let _lock = super::serve::lock(&data)?;
        node::sweep::sweep(&data)?;
        let progress = Progress::new();
        let begun = Instant::now();

        let guest = guest_binary(&config)?;
        if self.rebuild {
            remove_made(&data)?;
        }
        self.kernel(&data, &progress)?;
        progress.step("initramfs", || make_initramfs(&data, &guest))?;
        let disk_mib = config.template.disk_mib;
        progress.step("Debian root disk (a minute or two)", || make_base_disk(&data, disk_mib))?;
        progress.start("choosing the machine");
        let chosen = super::serve::choose_driver(self.machine, &data, &config).await?;
        progress.done(&format!("machine: {}", chosen.reason));
        progress.start("template base (boots a machine)");
        let template = make_base_template(&data, &config, chosen.driver).await?;
        let manifest = &template.manifest;
        progress.done(&format!(
            "template {BASE}: {} ({} MiB)",
            manifest.template_id,
            template.bytes()? >> 20
        ));
        progress.finish();
        if target.json {
            output::json(manifest)?;
        } else {
            output::note(&format!("ready after {:.0} s; next: pando serve", begun.elapsed().as_secs_f64()));
        }
        Ok(0)
    }

    fn kernel(&self, data: &DataDir, progress: &Progress) -> Result<()> {
        progress.step("kernel", || {
            if let Some(kernel) = &self.kernel {
                std::fs::create_dir_all(data.modules())?;
                std::fs::write(data.modules().join("order"), "")?;
                store::kernel::extract_vmlinux(kernel, &data.vmlinux())?;
                return Ok(true);
            }
            if data.vmlinux().exists() && data.modules().join("order").exists() {
                return Ok(false);
            }
            let work = data.tmp().join("kernel");
            std::fs::create_dir(&work)?;
            let package = store::kernel::fetch_package(&work)?;
            let half_made = work.join("vmlinux");
            store::kernel::extract_vmlinux(&store::kernel::find_vmlinuz(&package)?, &half_made)?;
            store::kernel::collect_modules(&package, &data.modules())?;
            std::fs::rename(&half_made, data.vmlinux())?;
            std::fs::remove_dir_all(&work)?;
            Ok(true)
        })
    }
}

/// What `--rebuild` makes anew: everything but the database and the keys.
fn remove_made(data: &DataDir) -> Result<()> {
    for path in [data.vmlinux(), data.initramfs(), data.base_disk()] {
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", path.display()));
            }
            _ => {}
        }
    }
    for template in std::fs::read_dir(data.templates())? {
        std::fs::remove_dir_all(template?.path())?;
    }
    Ok(())
}

/// The agent that goes into the initramfs.
fn guest_binary(config: &Config) -> Result<PathBuf> {
    if let Some(path) = &config.guest_binary {
        return Ok(path.clone());
    }
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let beside = program.parent().unwrap_or(Path::new("/"));
    let places = [beside.join("pando-guest"), beside.join("../x86_64-unknown-linux-musl/release/guest")];
    for place in &places {
        if place.exists() {
            return Ok(place.clone());
        }
    }
    bail!(
        "the guest agent is neither {} nor {}; build it with `make build`, or name it as guest_binary in the configuration",
        places[0].display(),
        places[1].display()
    )
}

fn make_initramfs(data: &DataDir, guest: &Path) -> Result<bool> {
    let half_made = data.tmp().join("initramfs");
    store::initramfs::write(guest, &data.modules(), &half_made)?;
    let same = data.initramfs().exists()
        && store::sha256_file(&half_made)? == store::sha256_file(&data.initramfs())?;
    if same {
        std::fs::remove_file(&half_made)?;
    } else {
        std::fs::rename(&half_made, data.initramfs())?;
    }
    Ok(!same)
}

fn make_base_disk(data: &DataDir, disk_mib: u64) -> Result<bool> {
    let there = std::fs::metadata(data.base_disk()).is_ok_and(|disk| disk.len() == disk_mib << 20);
    if there {
        return Ok(false);
    }
    let work = data.tmp().join("base");
    std::fs::create_dir(&work)?;
    let half_made = work.join("base.raw");
    store::rootfs::build_debian(&work, &half_made, disk_mib)?;
    std::fs::rename(&half_made, data.base_disk())?;
    std::fs::remove_dir_all(&work)?;
    Ok(true)
}

/// The template, as it is if it still fits, made anew otherwise.
async fn make_base_template(data: &DataDir, config: &Config, driver: Arc<dyn Driver>) -> Result<Template> {
    let (name, version) = driver.identity();
    let wanted = &config.template;
    let (kernel, initramfs) = (store::sha256_file(&data.vmlinux())?, store::sha256_file(&data.initramfs())?);
    let fits = |template: &Template| {
        let machine = &template.manifest.machine;
        template.manifest.aliases.iter().any(|alias| alias == BASE)
            && machine.is_for(name, version)
            && (machine.vcpus, machine.memory_mib, machine.disk_mib)
                == (wanted.vcpus, wanted.memory_mib, wanted.disk_mib)
            && (machine.kernel == kernel && machine.initramfs == initramfs)
    };
    let (templates, damaged) = store::template::list(data)?;
    for error in damaged {
        output::note(&format!("warning: {error}"));
    }
    let (fitting, stale): (Vec<_>, Vec<_>) = templates.into_iter().partition(fits);
    let template = match fitting.into_iter().next_back() {
        Some(template) => {
            template.verify()?;
            template
        }
        None => {
            // Held until the machine has ended.
            let uids = node::uids::Uids::reserve(config.limits.uid_base, 1)?;
            let plan = node::template::Plan {
                disk: data.base_disk(),
                aliases: vec![BASE.to_owned()],
                vcpus: wanted.vcpus,
                memory_mib: wanted.memory_mib,
                disk_mib: wanted.disk_mib,
                uid: uids.first(),
                defaults: GuestDefaults {
                    user: "user".to_owned(),
                    workdir: String::new(),
                    env: BTreeMap::new(),
                },
            };
            node::template::build(data, driver.clone(), plan).await?
        }
    };
    // The new one is there: what it replaces can go.
    for old in stale.iter().filter(|old| old.manifest.aliases.iter().any(|alias| alias == BASE)) {
        store::template::remove(data, &old.manifest.template_id)?;
    }
    Ok(template)
}

/// A bar for the whole, a spinner for the step; plain lines where there is no terminal.
struct Progress {
    bar: ProgressBar,
}

impl Progress {
    fn new() -> Self {
        let bar = ProgressBar::new(STEPS);
        let style = ProgressStyle::with_template("{spinner} [{bar:24}] {pos}/{len} {msg} {elapsed}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.enable_steady_tick(Duration::from_millis(120));
        Self { bar }
    }

    fn start(&self, what: &str) {
        self.bar.set_message(what.to_owned());
        if self.bar.is_hidden() {
            output::note(&format!("{what}…"));
        }
    }

    fn done(&self, what: &str) {
        self.bar.inc(1);
        if self.bar.is_hidden() {
            output::note(&format!("  {what}"));
        } else {
            self.bar.println(format!("  {what}"));
        }
    }

    /// Runs a step; `work` says whether anything had to be done.
    fn step(&self, what: &str, work: impl FnOnce() -> Result<bool>) -> Result<()> {
        self.start(what);
        let begun = Instant::now();
        let made = work().with_context(|| format!("making the {what} failed"))?;
        let outcome =
            if made { format!("made in {:.1} s", begun.elapsed().as_secs_f64()) } else { "there".to_owned() };
        self.done(&format!("{what}: {outcome}"));
        Ok(())
    }

    fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
