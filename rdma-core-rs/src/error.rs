//! What can go wrong, in words that name the call, the field or the cure.

use std::fmt;
use std::io;
use std::path::PathBuf;

/// The result of everything in this crate that is not a post.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a verbs call, or of a check made before one.
///
/// Unless a method says otherwise, nothing has changed when it returns an error: the object that
/// was to be made does not exist, and the object that was to be modified is as it was.
///
/// ```
/// use rdma_core_rs::{CompletionQueue, Error};
///
/// # let _fabric = fake_verbs::Fabric::new();
/// # let context = rdma_core_rs::devices()?[0].open()?;
/// match CompletionQueue::new(&context, 1_000_000, None) {
///     Err(Error::Config { field, allowed, .. }) => println!("{field}: {allowed} is allowed"),
///     Err(Error::Call { call, source }) => println!("{call} failed: {source}"),
///     other => drop(other?),
/// }
/// # Ok::<(), rdma_core_rs::Error>(())
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A C function failed; `call` is its name.
    #[error("{call}: {source}")]
    Call {
        /// The C function.
        call: &'static str,
        /// What it reported.
        source: io::Error,
    },

    /// The running kernel has no RDMA support, neither built in nor as a module.
    #[error(
        "this kernel has no RDMA support (no ib_uverbs, neither built in nor under /lib/modules): \
         boot a kernel with CONFIG_INFINIBAND_USER_ACCESS, or install its extra modules package"
    )]
    NoKernelSupport {
        /// What the device list call reported.
        source: io::Error,
    },

    /// The kernel has RDMA support, but the module that gives programs access is not loaded.
    #[error("kernel module {module} is not loaded: run `modprobe {module}` as root")]
    ModuleMissing {
        /// The module to load.
        module: &'static str,
        /// What the failed call reported.
        source: io::Error,
    },

    /// The device exists but this process may not open its file.
    #[error(
        "no permission to open {}: {source}; give the user read and write access to it (a udev \
         rule, or the group that owns /dev/infiniband)", path.display()
    )]
    PermissionDenied {
        /// The device file.
        path: PathBuf,
        /// What the failed call reported.
        source: io::Error,
    },

    /// Memory could not be pinned because the process's limit on locked memory is too low: without
    /// CAP_IPC_LOCK, what it has pinned already and this do not fit. (A registration that fails with the
    /// same errno though they fit is a [`Call`](Error::Call).)
    #[error(
        "ibv_reg_mr: cannot pin {asked} bytes: the limit on locked memory (memlock, RLIMIT_MEMLOCK) is \
         {limit} bytes; raise it with `ulimit -l`, LimitMEMLOCK= or limits.conf ({source})"
    )]
    Memlock {
        /// Bytes that were to be registered.
        asked: u64,
        /// The soft limit in bytes, for the whole process.
        limit: u64,
        /// What the registration reported: `ENOMEM` or `EAGAIN`, or `EPERM` when the limit is 0.
        source: io::Error,
    },

    /// A value of a configuration is outside what the device (or verbs) allows.
    #[error("{field} = {asked} is not possible: {allowed} is allowed")]
    Config {
        /// The field, by its name in this crate.
        field: &'static str,
        /// What was asked for.
        asked: u64,
        /// What is allowed.
        allowed: Allowed,
    },

    /// The device, its driver or the kernel does not offer this.
    #[error("{what} is not supported by this device")]
    NotSupported {
        /// What was asked for.
        what: &'static str,
    },

    /// A range does not lie inside the memory it was to be cut from.
    #[error(transparent)]
    OutOfRange(#[from] OutOfRange),

    /// Two objects that were to work together belong to different device contexts or protection
    /// domains.
    #[error("{what} belongs to another {of}")]
    Foreign {
        /// The object that does not fit.
        what: &'static str,
        /// What it should have shared: "context" or "protection domain".
        of: &'static str,
    },

    /// Something that needs an object to itself found that it is used elsewhere.
    #[error("{what} is in use elsewhere")]
    InUse {
        /// The object.
        what: &'static str,
    },

    /// The object was made before a `fork`, and this is the child.
    ///
    /// The device file is shared with the parent, so a call made here would act on the parent's
    /// objects. Open the device again in the child.
    #[error("the device was opened before a fork and cannot be used in the child")]
    Forked,
}

impl Error {
    /// The errno of the C call that failed, if there was one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Error::Call { source, .. }
            | Error::NoKernelSupport { source }
            | Error::ModuleMissing { source, .. }
            | Error::PermissionDenied { source, .. }
            | Error::Memlock { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }

    /// The error of a call that has just failed and left its reason in errno.
    #[cold]
    pub(crate) fn last(call: &'static str) -> Error {
        Error::Call {
            call,
            source: io::Error::last_os_error(),
        }
    }

    /// Turns the errno values that mean "there is no such function here" into
    /// [`Error::NotSupported`].
    pub(crate) fn or_not_supported(self, what: &'static str) -> Error {
        match self.errno() {
            Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EPROTONOSUPPORT) => {
                Error::NotSupported { what }
            }
            _ => self,
        }
    }
}

/// What an [`Error::Config`] would have accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Allowed {
    /// Anything up to and including this.
    AtMost(u64),
    /// Anything from this on.
    AtLeast(u64),
    /// From the first to the second, both included.
    Between(u64, u64),
    /// Only this.
    Only(u64),
}

impl fmt::Display for Allowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Allowed::AtMost(max) => write!(f, "at most {max}"),
            Allowed::AtLeast(min) => write!(f, "at least {min}"),
            Allowed::Between(min, max) => write!(f, "{min} to {max}"),
            Allowed::Only(value) => write!(f, "only {value}"),
        }
    }
}

/// A range that does not lie inside a slice or region, or is not aligned as an atomic needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("range {start}..{end} is outside the {len} bytes there are, or is not aligned")]
pub struct OutOfRange {
    /// First byte asked for.
    pub start: u64,
    /// One past the last byte asked for.
    pub end: u64,
    /// How many bytes there are.
    pub len: u64,
}

/// `Ok` if `asked <= max`, else an error naming the field.
pub(crate) fn at_most(field: &'static str, asked: u64, max: u64) -> Result<()> {
    if asked <= max {
        Ok(())
    } else {
        Err(Error::Config {
            field,
            asked,
            allowed: Allowed::AtMost(max),
        })
    }
}

/// `Ok` if `asked >= min`, else an error naming the field.
pub(crate) fn at_least(field: &'static str, asked: u64, min: u64) -> Result<()> {
    if asked >= min {
        Ok(())
    } else {
        Err(Error::Config {
            field,
            asked,
            allowed: Allowed::AtLeast(min),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn config_error_names_field_asked_and_allowed() {
        let text = at_most("max_send_wr", 70_000, 32_767)
            .unwrap_err()
            .to_string();
        assert_eq!(
            text,
            "max_send_wr = 70000 is not possible: at most 32767 is allowed"
        );
    }

    #[test]
    fn memlock_error_names_the_limit_and_the_word() {
        let source = io::Error::from_raw_os_error(libc::ENOMEM);
        let text = Error::Memlock {
            asked: 1 << 20,
            limit: 65536,
            source,
        }
        .to_string();
        assert!(text.contains("memlock") && text.contains("65536") && text.contains("1048576"));
    }

    #[test]
    fn only_the_errnos_of_a_missing_function_mean_not_supported() {
        let call = |errno| Error::Call {
            call: "x",
            source: io::Error::from_raw_os_error(errno),
        };
        assert!(matches!(
            call(libc::ENOSYS).or_not_supported("y"),
            Error::NotSupported { .. }
        ));
        assert!(matches!(
            call(libc::EINVAL).or_not_supported("y"),
            Error::Call { .. }
        ));
    }
}
