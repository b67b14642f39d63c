//! The test's side: the handle that makes the fabric, disturbs it and checks it.

use std::net::SocketAddr;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rdma_sys::ibv_qp_state;

use crate::async_event::{self, Element};
use crate::cm::{Body, Pending};
use crate::config::Config;
use crate::cq::{Completion, Cqe};
use crate::fault::{self, RefusedPost};
use crate::world::{World, lock, with};

/// Whether a fabric exists; the next [`Fabric::new`] waits for it to go.
static TAKEN: Mutex<bool> = Mutex::new(false);
static FREE: Condvar = Condvar::new();

/// The fake fabric. While it exists, the `ibv_*` and `rdma_*` calls of this process work on it; there is one at a time, so
/// tests that make one take turns.
///
/// Dropping it is a check: it panics if a rule of the C interface was broken or an object is left
/// (see [`Fabric::check`]). Declare it first in a test, so that it is dropped last.
#[derive(Debug)]
pub struct Fabric {
    checked: bool,
}

/// Objects the application has, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // the names say it
pub struct LiveObjects {
    pub device_lists: usize,
    pub contexts: usize,
    pub pds: usize,
    pub mrs: usize,
    pub mws: usize,
    pub comp_channels: usize,
    pub cqs: usize,
    pub srqs: usize,
    pub qps: usize,
    pub ahs: usize,
    pub event_channels: usize,
    pub ids: usize,
    pub cm_events: usize,
    pub context_lists: usize,
    pub addrinfos: usize,
}

impl LiveObjects {
    /// Number of objects of all kinds.
    pub fn total(&self) -> usize {
        let verbs = self.device_lists + self.contexts + self.pds + self.mrs + self.mws;
        let queues = self.comp_channels + self.cqs + self.srqs + self.qps + self.ahs;
        let cm = self.event_channels + self.ids + self.cm_events + self.context_lists;
        verbs + queues + cm + self.addrinfos
    }
}

/// A queue pair as the fabric sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpInfo {
    /// Its number, unique over all devices.
    pub qp_num: u32,
    /// Index of its device.
    pub device: usize,
    /// An `ibv_qp_state`.
    pub state: u32,
    /// Its completion queue for sends.
    pub send_cq: CqId,
    /// Its completion queue for receives.
    pub recv_cq: CqId,
    /// Sends whose slots are not free yet, executed or not.
    pub sends: usize,
    /// Sends that were not executed yet.
    pub unexecuted: usize,
    /// Receives that wait for a message.
    pub receives: usize,
    /// The peer's `dest_qp_num`, 0 while unconnected.
    pub dest_qp_num: u32,
    /// Attributes set by modify that tests like to see: timeout, retry_cnt, rnr_retry, min_rnr_timer.
    pub timers: [u8; 4],
    /// max_rd_atomic and max_dest_rd_atomic.
    pub read_depths: [u8; 2],
}

/// Names a completion queue: queues are numbered in the order of their making.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CqId(u32);

/// A completion queue as the fabric sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CqInfo {
    /// Its name.
    pub id: CqId,
    /// Entries it can hold.
    pub depth: usize,
    /// Entries that were not polled yet.
    pub entries: usize,
    /// Whether the next completion makes an event (of any kind, or solicited ones only).
    pub armed: bool,
    /// Whether entries were lost.
    pub overrun: bool,
}

/// Names a cm id: ids are numbered in the order of their making, the kernel's ids of incoming requests among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct IdName(u32);

/// A cm id as the fabric sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdInfo {
    /// Its name.
    pub name: IdName,
    /// Its device, once it has one.
    pub device: Option<usize>,
    /// Its own address, once it has one.
    pub local: Option<SocketAddr>,
    /// The address it connects to, or was connected from.
    pub peer: Option<SocketAddr>,
    /// Whether it came from an incoming request.
    pub passive: bool,
    /// Where it is on its way, in words: `"Established"` and so on.
    pub state: String,
}

impl LiveObjects {
    /// Leaves out what must stay behind when this call failed: the object, what it needs, and what it may still use.
    fn forgive(&mut self, failed_call: &str) {
        let parents = |left: &mut Self| (left.pds, left.contexts) = (0, 0);
        match failed_call {
            "ibv_destroy_qp" | "ibv_detach_mcast" => {
                // The queue pair may still read and write its memory.
                (self.qps, self.mrs, self.mws, self.srqs, self.ahs) = (0, 0, 0, 0, 0);
                (self.cqs, self.comp_channels) = (0, 0);
                parents(self);
                self.forgive("rdma_destroy_id");
            }
            "ibv_destroy_srq" => {
                (self.srqs, self.mrs) = (0, 0);
                parents(self);
            }
            "ibv_destroy_cq" => (self.cqs, self.comp_channels, self.contexts) = (0, 0, 0),
            "ibv_destroy_comp_channel" => (self.comp_channels, self.contexts) = (0, 0),
            "ibv_dereg_mr" => {
                self.mrs = 0;
                parents(self);
            }
            "ibv_dealloc_mw" => {
                (self.mws, self.mrs) = (0, 0);
                parents(self);
            }
            "ibv_destroy_ah" => {
                self.ahs = 0;
                parents(self);
            }
            "ibv_dealloc_pd" => parents(self),
            "ibv_close_device" => self.contexts = 0,
            "rdma_destroy_id" => (self.ids, self.event_channels, self.context_lists) = (0, 0, 0),
            _ => {}
        }
    }
}

impl Fabric {
    /// A fabric of two devices, strict in all it checks. Waits while another fabric exists.
    #[allow(clippy::new_without_default)] // a fabric is an event, not a value
    pub fn new() -> Self {
        Self::with(Config::default())
    }

    /// A fabric with the given behaviour. Waits while another fabric exists.
    pub fn with(config: Config) -> Self {
        crate::link::assert_linked();
        let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
        while *taken {
            taken = FREE.wait(taken).unwrap_or_else(PoisonError::into_inner);
        }
        *taken = true;
        drop(taken);
        *lock() = Some(World::new(config));
        Self { checked: false }
    }

    // --- faults -----------------------------------------------------------------------------

    /// Makes the `nth` call of a kind from now on (0 is the next) fail with `errno`, before it has any effect.
    ///
    /// # Panics
    /// If the fabric knows no such call.
    pub fn fail_nth(&self, call: &str, nth: u64, errno: i32) {
        let call = fault::known(call).unwrap_or_else(|| panic!("no such call: {call}"));
        with(|w| w.faults.fail_nth(call, nth, errno));
    }

    /// Makes the call of this number fail with `errno`, counted from 0 over all calls that make, change or query something.
    /// Polling (`ibv_poll_cq`, `*_get_*_event`) and giving back (`destroy`, `dealloc`, `rdma_disconnect`...) do not count.
    ///
    /// For a sweep over all of a program's calls: see the example of the crate.
    pub fn fail_call_number(&self, number: u64, errno: i32) {
        with(|w| w.faults.fail_call_number(number, errno));
    }

    /// As [`Self::fail_call_number`], for the calls that give something back. What has to stay behind then (the object, its
    /// parents, and the memory a queue pair may still use) is not reported as a leak, nor the refusal of a parent to go as a
    /// violation.
    pub fn fail_destroy_number(&self, number: u64, errno: i32) {
        with(|w| w.faults.fail_destroy_number(number, errno));
    }

    /// How many calls [`Self::fail_call_number`] has counted.
    pub fn calls_made(&self) -> u64 {
        with(|w| w.faults.calls_made())
    }

    /// How many calls [`Self::fail_destroy_number`] has counted.
    pub fn destroys_made(&self) -> u64 {
        with(|w| w.faults.destroys_made())
    }

    /// How often this C function was called.
    pub fn count_of(&self, call: &str) -> u64 {
        with(|w| w.faults.count_of(call))
    }

    /// The calls that failed by plan, in order.
    pub fn failed_calls(&self) -> Vec<&'static str> {
        with(|w| w.faults.fired.clone())
    }

    /// Forgets all planned failures that have not happened.
    pub fn clear_faults(&self) {
        with(|w| w.faults.clear());
    }

    /// Refuses request number `index` of the next chain posted by `call` (`ibv_post_send`, `ibv_post_recv`,
    /// `ibv_post_srq_recv`) that is long enough; what stands before it is posted, and `bad_wr` points to it.
    ///
    /// # Panics
    /// If the fabric knows no such call.
    pub fn refuse_post_at(&self, call: &str, index: usize, errno: i32) {
        let call = fault::known(call).unwrap_or_else(|| panic!("no such call: {call}"));
        with(|w| w.faults.refuse_post = Some(RefusedPost { call, index, errno }));
    }

    // --- delivery ---------------------------------------------------------------------------

    /// Executes one posted send, of the oldest queue pair that has one that can be. False if there is none.
    pub fn step(&self) -> bool {
        with(|w| w.step(false))
    }

    /// Executes the oldest posted send of one queue pair, for orders of events a test chooses. False if it cannot be.
    ///
    /// # Panics
    /// If there is no such queue pair.
    pub fn step_qp(&self, qp_num: u32) -> bool {
        with(|w| {
            let addr = qp_addr(w, qp_num);
            w.step_qp(addr, false)
        })
    }

    /// Executes all posted sends that can be; returns how many.
    pub fn deliver(&self) -> usize {
        with(|w| {
            std::iter::repeat_with(|| w.step(false))
                .take_while(|&moved| moved)
                .count()
        })
    }

    /// Changes when posted work is executed.
    pub fn set_delivery(&self, delivery: crate::Delivery) {
        with(|w| w.config.delivery = delivery);
    }

    /// Lets the retries of all requests run out that wait for a silent peer or for a receive (unless `rnr_retry` is 7, for
    /// ever): they fail with RETRY_EXC_ERR or RNR_RETRY_EXC_ERR. Returns how many sends were executed or failed.
    pub fn expire_retries(&self) -> usize {
        with(|w| {
            std::iter::repeat_with(|| w.step(true))
                .take_while(|&moved| moved)
                .count()
        })
    }

    /// Cuts the wire between the devices: requests go unanswered, CM messages get lost.
    pub fn cut_link(&self) {
        with(|w| w.link_cut = true);
    }

    /// Mends the wire; what waited is delivered.
    pub fn mend_link(&self) {
        with(|w| w.link_cut = false);
    }

    /// The host of a device loses its power: it does nothing any more, and nobody is told.
    pub fn power_off(&self, device: usize) {
        with(|w| {
            w.dead_devices.insert(device);
        });
    }

    /// The process behind a device is killed: its queue pairs are gone, and its kernel tells the peers of its ids.
    pub fn kill(&self, device: usize) {
        with(|w| {
            w.cm_kill(device);
            w.dead_devices.insert(device);
        });
    }

    /// The device is unplugged: DEVICE_REMOVAL for its ids, DEVICE_FATAL on its contexts, and its queue pairs in error.
    pub fn remove_device(&self, device: usize) {
        with(|w| {
            w.remove_device(device);
            for qp in w.qps_in_order() {
                if w.qps.get(&qp).is_some_and(|qp| qp.device == device) {
                    w.break_down(qp);
                }
            }
        });
    }

    /// The device's port goes down or up, with the async event on its contexts.
    pub fn set_port(&self, device: usize, up: bool) {
        use async_event::number::{PORT_ACTIVE, PORT_ERR};
        with(|w| w.devices[device].port_up = up);
        self.inject_port_event(device, 1, if up { PORT_ACTIVE } else { PORT_ERR });
    }

    // --- completions ------------------------------------------------------------------------

    /// Holds all new completions back, until [`Self::release_completions`].
    pub fn hold_completions(&self) {
        with(|w| w.hold_completions = true);
    }

    /// Lets the held completions go, in their order.
    pub fn release_completions(&self) {
        with(World::release_held);
    }

    /// Puts any completion into a queue: stale, foreign, twice, with an unknown status...
    ///
    /// # Panics
    /// If there is no such queue.
    pub fn inject_completion(&self, cq: CqId, wc: Completion) {
        with(|w| {
            let addr = cq_addr(w, cq);
            w.complete(
                addr,
                Cqe {
                    wc,
                    slot: None,
                    solicited: false,
                },
            );
        });
    }

    /// The completions in a queue that were not polled yet, oldest first.
    ///
    /// # Panics
    /// If there is no such queue.
    pub fn completions(&self, cq: CqId) -> Vec<Completion> {
        with(|w| {
            let addr = cq_addr(w, cq);
            w.cqs[&addr].entries.iter().map(|cqe| cqe.wc).collect()
        })
    }

    /// Repeats every completion that waits in the queue. The copies free no slot.
    ///
    /// # Panics
    /// If there is no such queue.
    pub fn duplicate_completions(&self, cq: CqId) {
        for wc in self.completions(cq) {
            self.inject_completion(cq, wc);
        }
    }

    /// Turns the order of the completions in the queue around, which no real device does.
    ///
    /// # Panics
    /// If there is no such queue.
    pub fn reverse_completions(&self, cq: CqId) {
        with(|w| {
            let addr = cq_addr(w, cq);
            if let Some(cq) = w.cqs.get_mut(&addr) {
                cq.entries.make_contiguous().reverse();
            }
        });
    }

    /// Loses the completions that wait in the queue; returns them.
    ///
    /// # Panics
    /// If there is no such queue.
    pub fn lose_completions(&self, cq: CqId) -> Vec<Completion> {
        with(|w| {
            let addr = cq_addr(w, cq);
            let lost = w
                .cqs
                .get_mut(&addr)
                .map(|cq| std::mem::take(&mut cq.entries));
            lost.unwrap_or_default()
                .into_iter()
                .map(|cqe| cqe.wc)
                .collect()
        })
    }

    /// An event of the queue without a completion, as real ones happen.
    ///
    /// # Panics
    /// If there is no such queue.
    pub fn spurious_cq_event(&self, cq: CqId) {
        with(|w| {
            let addr = cq_addr(w, cq);
            w.announce(addr);
        });
    }

    // --- queue pairs and async events -------------------------------------------------------

    /// Moves a queue pair to the error state behind the application's back: everything posted is flushed.
    ///
    /// # Panics
    /// If there is no such queue pair.
    pub fn break_qp(&self, qp_num: u32) {
        with(|w| {
            let addr = qp_addr(w, qp_num);
            w.break_down(addr);
        });
    }

    /// An async event about a queue pair; any number, also one no library knows.
    ///
    /// # Panics
    /// If there is no such queue pair.
    pub fn inject_qp_event(&self, qp_num: u32, number: u32) {
        with(|w| {
            let addr = qp_addr(w, qp_num);
            w.raise_qp(addr, number);
        });
    }

    /// An async event about a completion queue.
    ///
    /// # Panics
    /// If there is no such queue.
    pub fn inject_cq_event(&self, cq: CqId, number: u32) {
        with(|w| {
            let addr = cq_addr(w, cq);
            w.raise_cq(addr, number);
        });
    }

    /// An async event about a port (or, with a number like DEVICE_FATAL, the device), on all contexts of the device.
    pub fn inject_port_event(&self, device: usize, port: i32, number: u32) {
        with(|w| {
            let contexts: Vec<_> = w
                .contexts
                .values()
                .filter(|c| c.device == device)
                .map(|c| c.ptr)
                .collect();
            for context in contexts {
                w.raise(context, Element::Port(port), number);
            }
        });
    }

    // --- connection manager -----------------------------------------------------------------

    /// Loses the next `count` CM events of this kind.
    pub fn drop_cm_events(&self, event: u32, count: usize) {
        with(|w| w.cm.to_drop.push((event, count)));
    }

    /// Holds all new CM events back, until [`Self::release_cm_events`].
    pub fn hold_cm_events(&self) {
        with(|w| w.cm.hold = true);
    }

    /// Lets the held CM events go, in their order.
    pub fn release_cm_events(&self) {
        with(|w| {
            w.cm.hold = false;
            for event in std::mem::take(&mut w.cm.held) {
                w.push_event(event);
            }
        });
    }

    /// Delivers any CM event without data: UNREACHABLE, ADDR_CHANGE, a number no library knows...
    /// The state of the id does not change, except that after ADDR_ERROR and ROUTE_ERROR it can be
    /// resolved again.
    ///
    /// # Panics
    /// If there is no such id.
    pub fn inject_cm_event(&self, id: IdName, event: u32, status: i32) {
        with(|w| {
            let found = w.cm.ids.iter().find(|(_, record)| record.serial == id.0);
            let id = found.map(|(&addr, _)| addr).expect("no such id");
            w.forget_resolution(id, event);
            let body = Body::Nothing;
            w.push_event(Pending {
                id,
                listener: None,
                number: event,
                status,
                body,
            });
        });
    }

    /// Makes the next `event`, ADDR_RESOLVED or ROUTE_RESOLVED, an ADDR_ERROR or ROUTE_ERROR with status -1 and the
    /// reason in errno: librdmacm, which asks the kernel for the address or path when it fetches one, was refused it.
    pub fn fail_cm_query(&self, event: u32, errno: i32) {
        with(|w| w.cm.failing_query = Some((event, errno)));
    }

    /// Requests without an answer are sent again: those that got lost on the wire, that met a full backlog or a silenced port.
    pub fn resend_requests(&self) {
        with(World::resend_requests);
    }

    /// Delivers connection requests again to listeners on this port, after [`Self::silence_port`].
    pub fn unsilence_port(&self, port: u16) {
        with(|w| {
            w.cm.silent_ports.remove(&port);
        });
    }

    /// Listeners on this port never see a request: connects to them wait for [`Self::expire_connects`].
    pub fn silence_port(&self, port: u16) {
        with(|w| {
            w.cm.silent_ports.insert(port);
        });
    }

    /// Loses the last message of the next `count` handshakes (the RTU): the active side is established, the passive side
    /// does not learn it, unless it says so itself by `rdma_notify`.
    pub fn lose_establish(&self, count: usize) {
        with(|w| w.cm.lose_establish = count);
    }

    /// Connects without an answer, and accepts without one, give up: UNREACHABLE with status -ETIMEDOUT.
    pub fn expire_connects(&self) {
        with(World::expire_connects);
    }

    /// Disconnects without an answer give up: DISCONNECTED with status -ETIMEDOUT.
    pub fn expire_disconnects(&self) {
        with(World::expire_disconnects);
    }

    /// TIMEWAIT_EXIT for all ids whose disconnect is complete.
    pub fn expire_timewait(&self) {
        with(World::expire_timewait);
    }

    // --- looking ----------------------------------------------------------------------------

    /// All queue pairs, oldest first.
    pub fn qps(&self) -> Vec<QpInfo> {
        with(|w| {
            let qps = w.qps_in_order().into_iter();
            qps.filter_map(|addr| qp_info(w, addr)).collect()
        })
    }

    /// The state of a queue pair, an `ibv_qp_state`; `IBV_QPS_UNKNOWN` if there is no such.
    pub fn qp_state(&self, qp_num: u32) -> u32 {
        let found = self.qps().into_iter().find(|qp| qp.qp_num == qp_num);
        found.map_or(ibv_qp_state::IBV_QPS_UNKNOWN, |qp| qp.state)
    }

    /// All completion queues, oldest first.
    pub fn cqs(&self) -> Vec<CqInfo> {
        let mut cqs: Vec<CqInfo> = with(|w| w.cqs.values().map(cq_info).collect());
        cqs.sort_unstable_by_key(|cq| cq.id);
        cqs
    }

    /// All cm ids, oldest first.
    pub fn ids(&self) -> Vec<IdInfo> {
        let mut ids: Vec<IdInfo> = with(|w| w.cm.ids.values().map(id_info).collect());
        ids.sort_unstable_by_key(|id| id.name);
        ids
    }

    /// The objects the application has and must give back.
    pub fn live_objects(&self) -> LiveObjects {
        with(|w| live_objects(w))
    }

    /// The rules broken so far; they are taken out, so that the drop does not report them again.
    pub fn take_violations(&self) -> Vec<String> {
        with(|w| std::mem::take(&mut w.violations))
    }

    /// Panics if a rule of the C interface was broken, or if an object is left.
    ///
    /// # Panics
    /// See above; the message lists all of it.
    #[track_caller]
    pub fn check(mut self) {
        self.checked = true;
        settle();
        if let Some(report) = self.end() {
            panic!("{report}");
        }
    }

    /// Ends the fabric without a look at what is left, for tests of leaks.
    pub fn abandon(mut self) {
        self.checked = true;
        let _ = self.end();
    }

    fn end(&mut self) -> Option<String> {
        let world = lock().take()?;
        let left = left_behind(&world);
        let mut report = String::new();
        for violation in &world.violations {
            report += &format!("\n  rule broken: {violation}");
        }
        if left.total() > 0 {
            report += &format!("\n  left behind: {left:?}");
        }
        drop(world);
        crate::world::wake_all();
        *TAKEN.lock().unwrap_or_else(PoisonError::into_inner) = false;
        FREE.notify_one();
        (!report.is_empty()).then(|| format!("the fabric was not left in order:{report}"))
    }
}

/// Waits, not for long, until no id is left if rdma_notify was called: one may be on its way out in a thread of its
/// own, which a loaded machine has not run yet.
fn settle() {
    let until = Instant::now() + Duration::from_secs(5);
    let leaves = || {
        let guard = lock();
        let Some(world) = guard.as_ref().filter(|world| world.cm.notified) else {
            return false;
        };
        let left = left_behind(world);
        left.ids + left.event_channels > 0
    };
    while leaves() && Instant::now() < until && !std::thread::panicking() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The objects that are left, without those whose destruction was made to fail.
fn left_behind(world: &World) -> LiveObjects {
    let mut left = live_objects(world);
    let failed = &world.faults.fired;
    failed.iter().for_each(|call| left.forgive(call));
    left
}

impl Drop for Fabric {
    fn drop(&mut self) {
        // After check() or abandon() the world is another test's.
        if self.checked {
            return;
        }
        settle();
        if let Some(report) = self.end().filter(|_| !std::thread::panicking()) {
            panic!("{report}");
        }
    }
}

fn cq_addr(w: &World, cq: CqId) -> usize {
    let found = w.cqs.iter().find(|(_, record)| record.serial == cq.0);
    found
        .map(|(&addr, _)| addr)
        .expect("no such completion queue")
}

fn qp_addr(w: &World, qp_num: u32) -> usize {
    w.qp_numbers
        .get(&qp_num)
        .copied()
        .expect("no such queue pair")
}

fn qp_info(w: &World, addr: usize) -> Option<QpInfo> {
    let qp = w.qps.get(&addr)?;
    let cq = |addr| Some(CqId(w.cqs.get(&addr)?.serial));
    let attr = &qp.attr;
    Some(QpInfo {
        qp_num: qp.num,
        device: qp.device,
        state: qp.state,
        send_cq: cq(qp.send_cq)?,
        recv_cq: cq(qp.recv_cq)?,
        sends: qp.sq.len(),
        unexecuted: qp.sq.iter().filter(|wqe| !wqe.done).count(),
        receives: qp.rq.posted.len(),
        dest_qp_num: attr.dest_qp_num,
        timers: [
            attr.timeout,
            attr.retry_cnt,
            attr.rnr_retry,
            attr.min_rnr_timer,
        ],
        read_depths: [attr.max_rd_atomic, attr.max_dest_rd_atomic],
    })
}

fn cq_info(cq: &crate::cq::Cq) -> CqInfo {
    CqInfo {
        id: CqId(cq.serial),
        depth: cq.depth,
        entries: cq.entries.len(),
        armed: cq.armed != crate::cq::Armed::No,
        overrun: cq.overrun,
    }
}

fn id_info(id: &crate::cm::Id) -> IdInfo {
    IdInfo {
        name: IdName(id.serial),
        device: id.device,
        local: id.src,
        peer: id.dst,
        passive: id.listener.is_some(),
        state: format!("{:?}", id.state),
    }
}

fn live_objects(w: &World) -> LiveObjects {
    LiveObjects {
        device_lists: w.device_lists.len(),
        contexts: w.contexts.values().filter(|c| !c.of_cm).count(),
        pds: w.pds.values().filter(|pd| !pd.of_cm).count(),
        mrs: w.mrs.len(),
        mws: w.mws.len(),
        comp_channels: w.channels.len(),
        cqs: w.cqs.len(),
        srqs: w.srqs.len(),
        qps: w.qps.len(),
        ahs: w.ahs.len(),
        event_channels: w.cm.channels.len(),
        ids: w.cm.ids.values().filter(|id| id.visible).count(),
        cm_events: w.cm.got.len(),
        context_lists: w.cm.context_lists(),
        addrinfos: w.cm.addrinfos.len(),
    }
}
