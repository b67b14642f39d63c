//! The state behind the C symbols, its one lock, and the way in and out of a C call.
#![allow(unsafe_code)] // sends the raw pointers inside the state between threads; sets errno

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use libc::c_int;

use crate::ah::AddressHandle;
use crate::async_event::Element;
use crate::cm::Cm;
use crate::config::Config;
use crate::cq::{CompChannel, Cq};
use crate::device::{Context, Device};
use crate::fault::Faults;
use crate::mr::{Mr, Mw};
use crate::pd::Pd;
use crate::qp::Qp;
use crate::srq::Srq;

/// `Err` carries an errno.
pub(crate) type Outcome<T> = Result<T, c_int>;

/// Objects by the address of their C struct.
pub(crate) type Table<T> = BTreeMap<usize, T>;

/// Everything the fabric knows.
pub(crate) struct World {
    pub(crate) config: Config,
    pub(crate) faults: Faults,
    pub(crate) violations: Vec<String>,
    pub(crate) call: &'static str,
    pub(crate) devices: Vec<Device>,
    pub(crate) device_lists: BTreeMap<usize, Vec<usize>>,
    pub(crate) contexts: Table<Context>,
    pub(crate) pds: Table<Pd>,
    pub(crate) mrs: Table<Mr>,
    pub(crate) mws: Table<Mw>,
    pub(crate) channels: Table<CompChannel>,
    pub(crate) cqs: Table<Cq>,
    pub(crate) srqs: Table<Srq>,
    pub(crate) qps: Table<Qp>,
    /// The same by number, which is also the order of their making.
    pub(crate) qp_numbers: BTreeMap<u32, usize>,
    pub(crate) ahs: Table<AddressHandle>,
    pub(crate) cm: Cm,
    pub(crate) hold_completions: bool,
    pub(crate) link_cut: bool,
    pub(crate) dead_devices: BTreeSet<usize>,
    /// Local keys of regions that are gone.
    pub(crate) dead_keys: BTreeSet<u32>,
    last_serial: u32,
    last_key: u32,
    last_qpn: u32,
}

// SAFETY: the raw pointers inside point to C structs and registered memory; they are used under the lock only, and C
// allows each of these objects to be used from any thread.
unsafe impl Send for World {}

static WORLD: Mutex<Option<World>> = Mutex::new(None);
/// Rung at the end of every call: blocking calls look again.
static CHANGED: Condvar = Condvar::new();

impl World {
    pub(crate) fn new(config: Config) -> Self {
        let devices = (0..config.devices).map(Device::new).collect();
        Self {
            config,
            faults: Faults::default(),
            violations: Vec::new(),
            call: "",
            devices,
            device_lists: BTreeMap::new(),
            contexts: Table::new(),
            pds: Table::new(),
            mrs: Table::new(),
            mws: Table::new(),
            channels: Table::new(),
            cqs: Table::new(),
            srqs: Table::new(),
            qps: Table::new(),
            qp_numbers: BTreeMap::new(),
            ahs: Table::new(),
            cm: Cm::default(),
            hold_completions: false,
            link_cut: false,
            dead_devices: BTreeSet::new(),
            dead_keys: BTreeSet::new(),
            last_serial: 0,
            last_key: 0x100,
            last_qpn: 16,
        }
    }

    /// Numbers objects in the order of their making; never reused.
    pub(crate) fn serial(&mut self) -> u32 {
        self.last_serial += 1;
        self.last_serial
    }

    /// A fresh memory key. Keys differ between lkey and rkey so that mixing them up shows.
    pub(crate) fn key(&mut self) -> u32 {
        self.last_key += 1;
        self.last_key << 8
    }

    pub(crate) fn qp_num(&mut self) -> u32 {
        self.last_qpn += 1;
        self.last_qpn
    }

    /// Records that the application broke a rule of the C interface.
    pub(crate) fn violation(&mut self, what: impl std::fmt::Display) {
        let text = format!("{}: {what}", self.call);
        self.violations.push(text);
    }

    /// As [`Self::violation`], unless a destroy that failed by plan may be the reason.
    pub(crate) fn violation_unless_planned(&mut self, what: impl std::fmt::Display) {
        if !self.faults.destroy_failed {
            self.violation(what);
        }
    }

    /// For a pointer that is none of the live objects: recorded, and EINVAL to the caller.
    pub(crate) fn unknown<T>(&mut self, what: &str) -> Outcome<T> {
        self.violation(format_args!("not a live {what} (destroyed already?)"));
        Err(libc::EINVAL)
    }
}

/// The state, once the lock is had; `None` while no fabric exists.
pub(crate) fn lock() -> MutexGuard<'static, Option<World>> {
    WORLD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `f` on the state; for the test's side of the fabric.
pub(crate) fn with<T>(f: impl FnOnce(&mut World) -> T) -> T {
    let mut guard = lock();
    let world = guard
        .as_mut()
        .expect("a Fabric exists while its methods run");
    let out = f(world);
    world.settle();
    CHANGED.notify_all();
    out
}

/// The frame of every C call: lock, fault plan, the call itself, then whatever the fabric delivers by itself.
pub(crate) fn enter<T>(call: &'static str, f: impl FnOnce(&mut World) -> Outcome<T>) -> Outcome<T> {
    enter_locked(lock(), call, f)
}

/// As [`enter`], for calls that take away what async events are about: waits until those that were got are acked, as the C
/// library does; but not for ever.
pub(crate) fn enter_acked<T>(
    call: &'static str,
    element: Element,
    f: impl FnOnce(&mut World) -> Outcome<T>,
) -> Outcome<T> {
    let waits = |world: &mut Option<World>| {
        let world = world.as_mut();
        world.is_some_and(|w| w.unacked_of(0, element).is_some_and(|unacked| *unacked > 0))
    };
    let guard = CHANGED.wait_timeout_while(lock(), ACK_TIME, waits);
    enter_locked(guard.unwrap_or_else(PoisonError::into_inner).0, call, f)
}

const ACK_TIME: Duration = Duration::from_secs(5);

fn enter_locked<T>(
    mut guard: MutexGuard<'_, Option<World>>,
    call: &'static str,
    f: impl FnOnce(&mut World) -> Outcome<T>,
) -> Outcome<T> {
    let Some(world) = guard.as_mut() else {
        eprintln!("fake-verbs: {call} called while no Fabric exists");
        return Err(libc::ENOSYS);
    };
    world.call = call;
    world.faults.admit(call)?;
    let out = f(world);
    world.settle();
    CHANGED.notify_all();
    out
}

/// As [`enter`], for calls that may block: `f` gives `None` while there is nothing, and the lock is free while waiting.
pub(crate) fn enter_blocking<T>(
    call: &'static str,
    mut f: impl FnMut(&mut World) -> Outcome<Option<T>>,
) -> Outcome<T> {
    let mut guard = lock();
    match guard.as_mut() {
        None => return Err(libc::ENODEV),
        Some(world) => {
            world.call = call;
            world.faults.admit(call)?;
        }
    }
    loop {
        let world = guard.as_mut().ok_or(libc::ENODEV)?;
        world.call = call;
        if let Some(out) = f(world)? {
            return Ok(out);
        }
        guard = CHANGED.wait(guard).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Wakes blocked calls, so that they find the fabric gone.
pub(crate) fn wake_all() {
    CHANGED.notify_all();
}

/// Convention of `ibv_destroy_*`, `ibv_modify_*`, `ibv_post_*`: zero or a positive errno.
pub(crate) fn positive(outcome: Outcome<()>) -> c_int {
    outcome.err().unwrap_or(0)
}

/// Convention of `ibv_create_*`, `ibv_reg_mr`: NULL and errno, which a fault with errno 0 leaves as it is.
pub(crate) fn null<T>(outcome: Outcome<*mut T>) -> *mut T {
    outcome.unwrap_or_else(|errno| {
        if errno != 0 {
            set_errno(errno);
        }
        std::ptr::null_mut()
    })
}

/// Convention of `rdma_*`, `ibv_get_cq_event`: zero, or -1 and errno.
pub(crate) fn minus_one(outcome: Outcome<()>) -> c_int {
    match outcome {
        Ok(()) => 0,
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}

pub(crate) fn set_errno(errno: c_int) {
    // SAFETY: always a valid pointer to this thread's errno.
    let slot = unsafe { libc::__errno_location() };
    // SAFETY: see above; nobody else writes this thread's errno meanwhile.
    unsafe { slot.write(errno) };
}

pub(crate) fn errno() -> c_int {
    std::io::Error::last_os_error()
        .raw_os_error()
        .unwrap_or(libc::EIO)
}
