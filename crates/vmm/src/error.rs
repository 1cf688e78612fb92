//! What can go wrong with a machine, with the kind that a program can act on.

use std::io;

use proto::vmm::FailureCode;

/// A machine could not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// KVM refused something.
    #[error("KVM cannot {what}")]
    Kvm {
        /// What was asked of it.
        what: &'static str,
        /// Its answer.
        #[source]
        source: kvm_ioctls::Error,
    },
    /// The host's kernel refused something.
    #[error("cannot {what}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// A disk.
    #[error("disk {number}")]
    Disk {
        /// Which, from 0.
        number: usize,
        /// Why.
        #[source]
        source: disk::DiskError,
    },
    /// The kernel image.
    #[error("the kernel image is not one that can be booted: {0}")]
    Kernel(&'static str),
    /// The kernel image.
    #[error("the kernel image cannot be loaded")]
    Loader(#[source] linux_loader::loader::Error),
    /// Something does not fit into guest memory.
    #[error("{what} needs {needed} bytes and does not fit into guest memory")]
    DoesNotFit {
        /// What.
        what: &'static str,
        /// Its size.
        needed: u64,
    },
    /// The request is not what the protocol says.
    #[error("{0}")]
    BadRequest(String),
    /// Not in this phase.
    #[error("the machine is {phase:?} and cannot {request} now")]
    WrongPhase {
        /// The phase.
        phase: proto::vmm::Phase,
        /// What was asked.
        request: &'static str,
    },
    /// The state file.
    #[error("the snapshot cannot be read: {0}")]
    BadSnapshot(String),
    /// The snapshot needs what this processor has not.
    #[error(
        "the snapshot was taken on a processor with {0}, which this host has not; restore it on a host like the first, or make it anew here"
    )]
    CpuFeatures(String),
    /// A vCPU did not stop.
    #[error("vCPU {0} did not stop within {1} s")]
    Stuck(usize, u64),
}

impl Error {
    /// For a closure that wraps what the host's kernel said.
    pub fn io<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::Io { what, source: source.into() }
    }

    /// For a closure that wraps what KVM said.
    pub fn kvm(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Self {
        move |source| Self::Kvm { what, source }
    }

    /// The kind, as it stands in an answer.
    pub fn code(&self) -> FailureCode {
        match self {
            Self::BadRequest(_) | Self::Kernel(_) | Self::Loader(_) | Self::DoesNotFit { .. } => {
                FailureCode::BadRequest
            }
            Self::WrongPhase { .. } => FailureCode::WrongPhase,
            Self::BadSnapshot(_) => FailureCode::BadSnapshot,
            Self::CpuFeatures(_) => FailureCode::CpuFeatures,
            Self::Kvm { .. } | Self::Io { .. } | Self::Disk { .. } | Self::Stuck(..) => FailureCode::Host,
        }
    }
}
