//! The process of one microVM. Started by `pando serve`, which hands it everything as descriptors; docs/vmm.md says how to
//! start one by hand.
#![allow(unsafe_code)]

use std::os::fd::RawFd;
use std::process::ExitCode;

use kvm_ioctls::Kvm;
use vmm::server::Server;
use vmm::{Error, jail, sys};

const HELP: &str = "\
One process is one microVM. It is started by `pando serve` and told what to do over its control socket.

usage: vmm --control FD --kvm FD [--uid ID] [--zygote]

  --control FD  listening Unix socket of type SEQPACKET, inherited under this number
  --kvm FD      /dev/kvm, inherited under this number
  --uid ID      user and group to run under; needs root (default: stay as it is)
  --zygote      never run, only be copied; each copy may have a user of its own

Exit status: 0 when the machine has ended and somebody was told, 1 on an error, 2 on wrong arguments, 159 (SIGSYS)
when it did what its jail forbids.
";

struct Arguments {
    control: RawFd,
    kvm: RawFd,
    uid: Option<u32>,
    zygote: bool,
}

fn parse(arguments: &[String]) -> Option<Arguments> {
    let (mut control, mut kvm, mut uid, mut zygote) = (None, None, None, false);
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.as_str() {
            "--control" => control = Some(rest.next()?.parse().ok()?),
            "--kvm" => kvm = Some(rest.next()?.parse().ok()?),
            "--uid" => uid = Some(rest.next()?.parse().ok()?),
            "--zygote" => zygote = true,
            _ => return None,
        }
    }
    let (control, kvm) = (control?, kvm?);
    (control > 2 && kvm > 2 && control != kvm).then_some(Arguments { control, kvm, uid, zygote })
}

#[expect(clippy::print_stdout, reason = "help goes to standard output")]
fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.iter().any(|argument| argument == "--help" || argument == "-h") {
        print!("{HELP}");
        return ExitCode::SUCCESS;
    }
    let Some(arguments) = parse(&arguments) else {
        eprint!("{HELP}");
        return ExitCode::from(2);
    };
    match serve(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vmm: {}", proto::chain(&error));
            ExitCode::FAILURE
        }
    }
}

fn serve(arguments: &Arguments) -> Result<(), Error> {
    jail::enter(arguments.uid, arguments.zygote)?;
    // SAFETY: both numbers were inherited for this purpose, differ, and are taken once.
    let (kvm, control) = unsafe {
        use std::os::fd::{FromRawFd as _, IntoRawFd as _};
        let kvm = sys::take_fd(arguments.kvm).into_raw_fd();
        (Kvm::from_raw_fd(kvm), sys::take_fd(arguments.control))
    };
    if kvm.get_api_version() != 12 {
        return Err(Error::BadRequest("--kvm is not /dev/kvm".to_owned()));
    }
    Server::new(kvm, control, arguments.zygote).run()
}
