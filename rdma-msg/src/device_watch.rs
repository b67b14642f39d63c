//! The asynchronous events of a device, for all workers on it.
//!
//! The kernel has one queue of them per open device, and whoever reads an event has it alone. So the
//! workers of a context share one [`DeviceWatch`]. Its descriptor is in the epoll set of each of them:
//! whoever is woken by it first reads for all, puts into each worker's [`Mail`] what concerns it, and
//! kicks it. Nothing here is touched unless an event comes, an endpoint is made or ends, or a kick is
//! handled.
//!
//! # Locks
//!
//! A worker's state before the watch; the registry alone. Nothing is locked while the watch is: a kick
//! is a write to an eventfd. A thread that destroys an object waits in C until each event about it that
//! was read is acknowledged, which the reader does at once and needs no lock for.
//!
//! # Numbers that come again
//!
//! The number of a queue pair can be given to the next one as soon as it is destroyed. So it is taken
//! off the list before, with the mail about it; and an event is read and put into the mail under one
//! lock, so none can be on its way in between.

use std::collections::BTreeSet;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rdma_core_rs::{AsyncEvent, AsyncEvents, CompletionQueue, Context};
use slab::Slab;

use crate::error::Cause;
use crate::poller::Poller;
use crate::worker::State;

/// All that live. The dead are swept out when the next is made.
static WATCHES: Mutex<Vec<Weak<DeviceWatch>>> = Mutex::new(Vec::new());

/// See the [module's documentation](self).
struct DeviceWatch {
    events: AsyncEvents,
    members: Mutex<Members>,
}

#[derive(Default)]
struct Members {
    list: Slab<Member>,
    /// DEVICE_FATAL has come: whoever joins later has to know.
    failed: bool,
}

/// A worker.
struct Member {
    cq: CompletionQueue,
    poller: Arc<Poller>,
    queue_pairs: BTreeSet<u32>,
    /// Events of any kind that concerned it.
    count: u64,
    mail: Mail,
}

/// What has broken since the worker looked last.
#[derive(Debug, Default, PartialEq, Eq)]
struct Mail {
    device: bool,
    completion_queue: bool,
    queue_pairs: Vec<u32>,
}

/// A worker's share in the watch of its device. Dropping it leaves.
pub(crate) struct Membership {
    watch: Arc<DeviceWatch>,
    key: usize,
}

impl DeviceWatch {
    /// The one of this context.
    fn of(context: &Context) -> rdma_core_rs::Result<Arc<DeviceWatch>> {
        let mut watches = WATCHES.lock().unwrap_or_else(PoisonError::into_inner);
        watches.retain(|watch| watch.strong_count() > 0);
        let same = |watch: &Arc<DeviceWatch>| watch.events.context().is_same_device(context);
        if let Some(watch) = watches.iter().filter_map(Weak::upgrade).find(same) {
            return Ok(watch);
        }
        let watch = Arc::new(DeviceWatch {
            events: context.async_events()?,
            members: Mutex::default(),
        });
        watches.push(Arc::downgrade(&watch));
        Ok(watch)
    }

    fn lock(&self) -> MutexGuard<'_, Members> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Members {
    fn deliver(&mut self, event: AsyncEvent, reader: usize) {
        self.failed |= event == AsyncEvent::DeviceFatal;
        for (key, member) in &mut self.list {
            if member.take_in(event) && key != reader {
                member.poller.kick();
            }
        }
    }
}

impl Member {
    fn concerns(&self, event: AsyncEvent) -> bool {
        match (event, event.qp_num()) {
            (_, Some(qp_num)) => self.queue_pairs.contains(&qp_num),
            (AsyncEvent::CqErr { .. }, _) => event.is_for_cq(&self.cq),
            // No shared receive queue is ours.
            (AsyncEvent::SrqErr { .. } | AsyncEvent::SrqLimitReached { .. }, _) => false,
            _ => true,
        }
    }

    /// Whether it has to act.
    fn take_in(&mut self, event: AsyncEvent) -> bool {
        if !self.concerns(event) {
            return false;
        }
        self.count += 1;
        match event {
            AsyncEvent::DeviceFatal => self.mail.device = true,
            AsyncEvent::CqErr { .. } => self.mail.completion_queue = true,
            AsyncEvent::QpFatal { qp_num }
            | AsyncEvent::QpReqErr { qp_num }
            | AsyncEvent::QpAccessErr { qp_num } => {
                if !self.mail.queue_pairs.contains(&qp_num) {
                    self.mail.queue_pairs.push(qp_num);
                }
            }
            _ => return false,
        }
        true
    }
}

impl Membership {
    /// Joins the workers on this context. Without its events a worker works all the same, as most
    /// programs do, which never look at them; so an error is only logged.
    pub(crate) fn new(
        context: &Context,
        cq: &CompletionQueue,
        poller: &Arc<Poller>,
    ) -> Option<Membership> {
        let watch = DeviceWatch::of(context)
            .map_err(|error| log::warn!("the device's events are not looked at: {error}"))
            .ok()?;
        let mut members = watch.lock();
        let mail = Mail {
            device: members.failed,
            ..Mail::default()
        };
        if mail.device {
            poller.kick();
        }
        let key = members.list.insert(Member {
            cq: cq.clone(),
            poller: Arc::clone(poller),
            queue_pairs: BTreeSet::new(),
            count: 0,
            mail,
        });
        drop(members);
        let membership = Membership { watch, key };
        poller
            .add_device(&membership.watch.events)
            .map_err(|error| log::warn!("the device's events are not looked at: {error}"))
            .ok()?;
        Some(membership)
    }

    pub(crate) fn add_queue_pair(&self, qp_num: u32) {
        self.watch.lock().list[self.key].queue_pairs.insert(qp_num);
    }

    /// Before it is destroyed.
    pub(crate) fn remove_queue_pair(&self, qp_num: u32) {
        let members = &mut self.watch.lock().list;
        let member = &mut members[self.key];
        member.queue_pairs.remove(&qp_num);
        member.mail.queue_pairs.retain(|&other| other != qp_num);
    }

    /// How many events concerned this worker.
    pub(crate) fn count(&self) -> u64 {
        self.watch.lock().list[self.key].count
    }

    fn take_mail(&self) -> Mail {
        mem::take(&mut self.watch.lock().list[self.key].mail)
    }

    /// Reads what there is, for all workers.
    fn read(&self) -> rdma_core_rs::Result<()> {
        let events = &self.watch.events;
        let mut members = self.watch.lock();
        while let Some(event) = events.try_event()? {
            log::log!(
                level_of(event),
                "{}: {event:?}",
                events.context().device_name()
            );
            members.deliver(event, self.key);
        }
        Ok(())
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        let member = self.watch.lock().list.try_remove(self.key);
        drop(member); // and with it perhaps the completion queue, without the lock
    }
}

fn level_of(event: AsyncEvent) -> log::Level {
    match event {
        AsyncEvent::DeviceFatal | AsyncEvent::CqErr { .. } | AsyncEvent::SrqErr { .. } => {
            log::Level::Error
        }
        AsyncEvent::QpFatal { .. }
        | AsyncEvent::QpReqErr { .. }
        | AsyncEvent::QpAccessErr { .. }
        | AsyncEvent::PathMigErr { .. }
        | AsyncEvent::PortErr { .. } => log::Level::Warn,
        _ => log::Level::Debug,
    }
}

impl State {
    /// The device has events: reads them, and acts on those that concern this worker.
    #[cold]
    pub(crate) fn device_news(&mut self) {
        let Some(device) = &self.device else { return };
        if let Err(error) = device.read() {
            log::error!("the device's events are not looked at any more: {error}");
            self.poller_ref().remove_device(&device.watch.events);
        }
        self.device_mail();
    }

    /// Acts on what another worker has read. Endpoints are only marked.
    pub(crate) fn device_mail(&mut self) {
        let Some(device) = &self.device else { return };
        let mail = device.take_mail();
        if mail.device {
            self.fail_for_good(Cause::DeviceRemoved);
        } else if mail.completion_queue {
            self.fail_for_good(Cause::CompletionQueueError);
        }
        for qp_num in mail.queue_pairs {
            self.queue_pair_failed(qp_num);
        }
    }

    /// Ends one endpoint, as a failed completion does. The cause is open as yet, for such a completion
    /// may still come.
    fn queue_pair_failed(&mut self, qp_num: u32) {
        let found = self
            .endpoints
            .iter_mut()
            .find(|(_, ep)| ep.qp_num == qp_num && ep.qp.is_some());
        if let Some((index, ep)) = found {
            ep.qp_failed = true;
            ep.broken = true;
            self.mark(index as u32);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a failure is the test's
mod tests {
    use super::*;

    fn member(context: &Context) -> (CompletionQueue, Membership) {
        let cq = CompletionQueue::new(context, 4, None).unwrap();
        let poller = Arc::new(Poller::new().unwrap());
        let membership = Membership::new(context, &cq, &poller).unwrap();
        (cq, membership)
    }

    fn deliver(reader: &Membership, event: AsyncEvent) {
        reader.watch.lock().deliver(event, reader.key);
    }

    #[test]
    fn workers_of_one_context_share_a_watch() {
        let _fabric = fake_verbs::Fabric::new();
        let device = &rdma_core_rs::devices().unwrap()[0];
        let (one, other) = (device.open().unwrap(), device.open().unwrap());
        let (a, b, c) = (member(&one).1, member(&one).1, member(&other).1);
        assert!(Arc::ptr_eq(&a.watch, &b.watch));
        assert!(!Arc::ptr_eq(&a.watch, &c.watch));
        let watch = Arc::downgrade(&a.watch);
        drop((a, b));
        assert!(watch.upgrade().is_none());
    }

    #[test]
    fn a_queue_pair_does_not_get_the_mail_of_the_one_that_had_its_number() {
        let _fabric = fake_verbs::Fabric::new();
        let context = rdma_core_rs::devices().unwrap()[0].open().unwrap();
        let (a, b) = (member(&context).1, member(&context).1);
        let fatal = AsyncEvent::QpFatal { qp_num: 7 };
        a.add_queue_pair(7);
        deliver(&b, fatal);
        deliver(&b, fatal);
        assert_eq!(a.take_mail().queue_pairs, [7]);
        deliver(&b, fatal);
        a.remove_queue_pair(7);
        deliver(&b, fatal);
        a.add_queue_pair(7);
        assert_eq!(a.take_mail(), Mail::default());
        assert_eq!((a.count(), b.count()), (3, 0));
    }

    #[test]
    fn who_joins_a_failed_device_is_told() {
        let _fabric = fake_verbs::Fabric::new();
        let context = rdma_core_rs::devices().unwrap()[0].open().unwrap();
        let a = member(&context).1;
        deliver(&a, AsyncEvent::DeviceFatal);
        assert!(a.take_mail().device);
        assert!(member(&context).1.take_mail().device);
    }
}
