//! The devices of this machine.

#![allow(unsafe_code)] // calls C

use std::ffi::CStr;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use crate::context::Context;
use crate::error::{Error, Result};
use crate::sys::{self, ibv_node_type};

/// Lists the RDMA devices of this machine.
///
/// The list is empty when the kernel has RDMA support but no device.
///
/// ```
/// # let _fabric = fake_verbs::Fabric::new();
/// for device in rdma_core_rs::devices()? {
///     println!("{} {}", device.name(), device.guid());
/// }
/// # Ok::<(), rdma_core_rs::Error>(())
/// ```
///
/// # Errors
/// - [`Error::NoKernelSupport`]: the kernel has no `ib_uverbs`, neither built in nor as a module.
/// - [`Error::ModuleMissing`]: it has the module, but it is not loaded.
/// - [`Error::Call`] naming `ibv_get_device_list` for anything else.
#[doc(alias = "ibv_get_device_list")]
pub fn devices() -> Result<Vec<Device>> {
    let mut count = 0;
    // SAFETY: `count` is a local that the function fills in.
    let list = unsafe { sys::ibv_get_device_list(&raw mut count) };
    let list = match sys::check_null("ibv_get_device_list", list) {
        Ok(list) => Arc::new(DeviceList { list }),
        Err(error) => return Err(explain_missing_support(error, Path::new("/"))),
    };
    let count = usize::try_from(count).unwrap_or(0);
    // SAFETY: the function returned an array of `count` pointers, which lives until it is freed,
    // and `list` frees it when it is dropped, after this slice.
    let pointers = unsafe { slice::from_raw_parts(list.list.as_ptr(), count) };
    let device = |&raw| {
        Some(Device {
            raw: NonNull::new(raw)?,
            _list: list.clone(),
        })
    };
    Ok(pointers.iter().filter_map(device).collect())
}

/// The array that `ibv_get_device_list` returned; the devices in it live as long as it does.
struct DeviceList {
    list: NonNull<*mut sys::ibv_device>,
}

// SAFETY: the array is only read, and libibverbs counts references to devices atomically.
unsafe impl Send for DeviceList {}
// SAFETY: as for Send.
unsafe impl Sync for DeviceList {}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the array came from `ibv_get_device_list` and is freed once, after the last
        // `Device` that points into it.
        unsafe { sys::ibv_free_device_list(self.list.as_ptr()) };
    }
}

/// An RDMA device of this machine, not opened yet.
///
/// ```
/// use rdma_core_rs::{Error, devices};
///
/// # let _fabric = fake_verbs::Fabric::new();
/// let device = devices()?.into_iter().find(|device| device.name() == "fake0");
/// match device.expect("it is there").open() {
///     Ok(context) => println!("opened {}", context.device_name()),
///     Err(Error::PermissionDenied { path, .. }) => println!("may not open {}", path.display()),
///     Err(error) => return Err(error),
/// }
/// # Ok::<(), rdma_core_rs::Error>(())
/// ```
#[doc(alias = "ibv_device")]
#[derive(Clone)]
pub struct Device {
    raw: NonNull<sys::ibv_device>,
    _list: Arc<DeviceList>,
}

// SAFETY: an ibv_device does not change after it was listed, and `_list` keeps it alive.
unsafe impl Send for Device {}
// SAFETY: as for Send.
unsafe impl Sync for Device {}

impl Device {
    /// The name in the kernel, such as `mlx5_0` or `rxe0`.
    #[doc(alias = "ibv_get_device_name")]
    pub fn name(&self) -> &str {
        // SAFETY: the list that `self` holds keeps the device alive.
        let name = unsafe { sys::ibv_get_device_name(self.raw.as_ptr()) };
        // SAFETY: it returns a NUL-terminated array inside the device, which outlives `self`.
        let name = unsafe { CStr::from_ptr(name) };
        name.to_str().unwrap_or("?") // the kernel allows only ASCII
    }

    /// The globally unique identifier of the node.
    #[doc(alias = "ibv_get_device_guid")]
    pub fn guid(&self) -> Guid {
        // SAFETY: the list that `self` holds keeps the device alive.
        Guid(u64::from_be(unsafe {
            sys::ibv_get_device_guid(self.raw.as_ptr())
        }))
    }

    /// What kind of node it is.
    pub fn node_type(&self) -> NodeType {
        // SAFETY: the list that `self` holds keeps the device alive; the field is an integer.
        NodeType::from_raw(unsafe { (*self.raw.as_ptr()).node_type })
    }

    /// The NUMA node it is attached to, if the system tells.
    pub fn numa_node(&self) -> Option<u32> {
        let path = sysfs_device(self.name()).join("device/numa_node");
        fs::read_to_string(path).ok()?.trim().parse().ok() // -1 means none
    }

    /// Opens the device.
    ///
    /// # Errors
    /// - [`Error::PermissionDenied`]: this process may not open the device's file in
    ///   `/dev/infiniband`.
    /// - [`Error::Call`] naming `ibv_open_device` for anything else, such as `ENOENT` when the
    ///   device has gone.
    #[doc(alias = "ibv_open_device")]
    pub fn open(&self) -> Result<Context> {
        Context::open(self)
    }

    /// The C object. It lives as long as this device, a clone of it, or a context opened from it.
    pub fn as_raw(&self) -> NonNull<sys::ibv_device> {
        self.raw
    }

    /// The file that `open` opens.
    pub(crate) fn file(&self) -> PathBuf {
        // SAFETY: the list keeps the device alive; `&raw` makes no reference.
        let name = unsafe { &raw const (*self.raw.as_ptr()).dev_name };
        // SAFETY: `dev_name` is a NUL-terminated array (libibverbs fills it with snprintf).
        let name = unsafe { CStr::from_ptr(name.cast()) };
        Path::new("/dev/infiniband").join(name.to_str().unwrap_or("?"))
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("name", &self.name())
            .field("guid", &self.guid())
            .finish_non_exhaustive()
    }
}

/// A globally unique identifier, printed as `0011:2233:4455:6677`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Guid(pub u64);

impl fmt::Display for Guid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g, h, i] = self.0.to_be_bytes();
        write!(
            f,
            "{a:02x}{b:02x}:{c:02x}{d:02x}:{e:02x}{g:02x}:{h:02x}{i:02x}"
        )
    }
}

impl fmt::Debug for Guid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Guid({self})")
    }
}

/// The kind of node a device is.
#[doc(alias = "ibv_node_type")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NodeType {
    /// An InfiniBand or RoCE adapter.
    ChannelAdapter,
    /// An InfiniBand switch.
    Switch,
    /// An InfiniBand router.
    Router,
    /// An iWARP adapter.
    Rnic,
    /// A Cisco usNIC.
    Usnic,
    /// A Cisco usNIC over UDP.
    UsnicUdp,
    /// The driver does not say.
    Unspecified,
    /// A value this crate does not know.
    Unknown(i32),
}

impl NodeType {
    fn from_raw(raw: ibv_node_type::Type) -> NodeType {
        match raw {
            ibv_node_type::IBV_NODE_CA => NodeType::ChannelAdapter,
            ibv_node_type::IBV_NODE_SWITCH => NodeType::Switch,
            ibv_node_type::IBV_NODE_ROUTER => NodeType::Router,
            ibv_node_type::IBV_NODE_RNIC => NodeType::Rnic,
            ibv_node_type::IBV_NODE_USNIC => NodeType::Usnic,
            ibv_node_type::IBV_NODE_USNIC_UDP => NodeType::UsnicUdp,
            ibv_node_type::IBV_NODE_UNSPECIFIED => NodeType::Unspecified,
            other => NodeType::Unknown(other),
        }
    }
}

/// Where the kernel describes a device.
pub(crate) fn sysfs_device(name: &str) -> PathBuf {
    Path::new("/sys/class/infiniband").join(name)
}

/// Tells a kernel without RDMA from one whose module is not loaded.
///
/// libibverbs says ENOSYS to both: it only sees that `/sys/class/infiniband_verbs` is not there.
fn explain_missing_support(error: Error, root: &Path) -> Error {
    let Error::Call { call, source } = error else {
        return error;
    };
    if source.raw_os_error() != Some(libc::ENOSYS) || root.join("sys/module/ib_uverbs").exists() {
        return Error::Call { call, source };
    }
    match kernel_release(root).map(|release| has_module(root, &release, "ib_uverbs")) {
        Ok(true) => Error::ModuleMissing {
            module: "ib_uverbs",
            source,
        },
        _ => Error::NoKernelSupport { source },
    }
}

fn kernel_release(root: &Path) -> io::Result<String> {
    let release = fs::read_to_string(root.join("proc/sys/kernel/osrelease"))?;
    Ok(release.trim().to_owned())
}

/// Whether depmod's list of the kernel's modules has this one.
fn has_module(root: &Path, release: &str, module: &str) -> bool {
    let list = root.join("lib/modules").join(release).join("modules.dep");
    let name = format!("/{module}.ko"); // .ko, .ko.xz, .ko.zst
    fs::read_to_string(list).is_ok_and(|list| {
        list.lines()
            .any(|line| line.split(':').next().unwrap_or(line).contains(&name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enosys() -> Error {
        let source = io::Error::from_raw_os_error(libc::ENOSYS);
        Error::Call {
            call: "ibv_get_device_list",
            source,
        }
    }

    /// A root directory whose kernel is "1.2.3" and has the given line in modules.dep.
    fn root_with(name: &str, modules_dep: &str) -> PathBuf {
        let root = std::env::temp_dir().join(format!("rdma-core-rs-{}-{name}", std::process::id()));
        fs::create_dir_all(root.join("proc/sys/kernel")).unwrap();
        fs::create_dir_all(root.join("lib/modules/1.2.3")).unwrap();
        fs::write(root.join("proc/sys/kernel/osrelease"), "1.2.3\n").unwrap();
        fs::write(root.join("lib/modules/1.2.3/modules.dep"), modules_dep).unwrap();
        root
    }

    #[test]
    #[cfg_attr(miri, ignore = "needs the file system")]
    fn module_on_disk_but_not_loaded_is_told_from_a_kernel_without() {
        let line = "kernel/drivers/infiniband/core/ib_uverbs.ko.xz: kernel/x/ib_core.ko.xz\n";
        let with = root_with("with", line);
        let without = root_with("without", "kernel/net/x.ko: kernel/a/ib_uverbs.ko\n");

        let missing = explain_missing_support(enosys(), &with);
        let none = explain_missing_support(enosys(), &without);

        assert!(
            matches!(
                missing,
                Error::ModuleMissing {
                    module: "ib_uverbs",
                    ..
                }
            ),
            "{missing}"
        );
        assert!(missing.to_string().contains("modprobe ib_uverbs"));
        assert!(matches!(none, Error::NoKernelSupport { .. }), "{none}");
        fs::remove_dir_all(with).unwrap();
        fs::remove_dir_all(without).unwrap();
    }

    #[test]
    fn other_errors_stay_what_they_are() {
        let source = io::Error::from_raw_os_error(libc::ENOMEM);
        let error = Error::Call {
            call: "ibv_get_device_list",
            source,
        };
        let error = explain_missing_support(error, Path::new("/nowhere"));
        assert!(matches!(
            error,
            Error::Call {
                call: "ibv_get_device_list",
                ..
            }
        ));
    }

    #[test]
    fn guid_is_printed_as_the_tools_do() {
        assert_eq!(
            Guid(0x0011_2233_4455_6677).to_string(),
            "0011:2233:4455:6677"
        );
    }

    #[test]
    fn unknown_node_type_is_kept() {
        assert_eq!(NodeType::from_raw(99), NodeType::Unknown(99));
        assert_eq!(NodeType::from_raw(1), NodeType::ChannelAdapter);
    }
}
