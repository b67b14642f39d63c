//! Asynchronous events: what a context's `async_fd` announces.
#![allow(unsafe_code)] // defines C symbols; reads and writes the caller's event struct

use std::ptr;

use libc::c_int;
use rdma_sys::*;

use crate::cbox::get;
use crate::world::{World, enter, enter_blocking, minus_one};

/// The numbers of `enum ibv_event_type` the fake raises itself; tests may inject any other.
pub(crate) mod number {
    pub(crate) const CQ_ERR: u32 = 0;
    pub(crate) const QP_FATAL: u32 = 1;
    pub(crate) const QP_REQ_ERR: u32 = 2;
    pub(crate) const QP_ACCESS_ERR: u32 = 3;
    pub(crate) const COMM_EST: u32 = 4;
    pub(crate) const SQ_DRAINED: u32 = 5;
    pub(crate) const DEVICE_FATAL: u32 = 8;
    pub(crate) const PORT_ACTIVE: u32 = 9;
    pub(crate) const PORT_ERR: u32 = 10;
    pub(crate) const SRQ_LIMIT_REACHED: u32 = 15;
    pub(crate) const QP_LAST_WQE_REACHED: u32 = 16;
}

/// What an event is about; the address is that of the C struct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    Cq(usize),
    Qp(usize),
    Srq(usize),
    Port(i32),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct AsyncEvent {
    pub(crate) element: Element,
    pub(crate) number: u32,
}

/// `struct ibv_async_event` with the number as a plain integer: rdma-sys has an enum there that not every number fits.
/// A port number lies in the low half of the pointer, where the C union has it on a little-endian machine.
#[repr(C)]
struct RawEvent {
    element: *mut libc::c_void,
    number: u32,
}

const _: () = assert!(size_of::<RawEvent>() == size_of::<ibv_async_event>());

impl World {
    pub(crate) fn raise(&mut self, context: *mut ibv_context, element: Element, number: u32) {
        if let Some(context) = self.contexts.get_mut(&context.addr()) {
            context.events.push(AsyncEvent { element, number });
        }
    }

    pub(crate) fn raise_cq(&mut self, cq: usize, number: u32) {
        if let Some(context) = self.cqs.get(&cq).map(|cq| cq.context) {
            self.raise(context, Element::Cq(cq), number);
        }
    }

    pub(crate) fn raise_qp(&mut self, qp: usize, number: u32) {
        if let Some(context) = self.qps.get(&qp).map(|qp| qp.context) {
            self.raise(context, Element::Qp(qp), number);
        }
    }

    pub(crate) fn raise_srq(&mut self, srq: usize, number: u32) {
        if let Some(context) = self.srqs.get(&srq).map(|srq| srq.context) {
            self.raise(context, Element::Srq(srq), number);
        }
    }

    /// The object goes: its unfetched events go too, and fetched ones must have been acked.
    pub(crate) fn forget_events_of(&mut self, element: Element, unacked: u32) {
        if unacked > 0 {
            self.violation(format_args!(
                "{unacked} async events of the object were not acked"
            ));
        }
        for context in self.contexts.values_mut() {
            context.events.withdraw(|event| event.element == element);
        }
    }

    /// The count of events got and not acked, of whatever the event is about.
    pub(crate) fn unacked_of(&mut self, context: usize, element: Element) -> Option<&mut u32> {
        match element {
            Element::Cq(cq) => self.cqs.get_mut(&cq).map(|cq| &mut cq.async_unacked),
            Element::Qp(qp) => self.qps.get_mut(&qp).map(|qp| &mut qp.async_unacked),
            Element::Srq(srq) => self.srqs.get_mut(&srq).map(|srq| &mut srq.async_unacked),
            Element::Port(_) => self.contexts.get_mut(&context).map(|c| &mut c.unacked),
        }
    }

    fn raw_event(&self, event: AsyncEvent) -> RawEvent {
        let object = match event.element {
            Element::Cq(cq) => self.cqs.get(&cq).map(|c| c.ptr().cast()),
            Element::Qp(qp) => self.qps.get(&qp).map(|q| q.ptr().cast()),
            Element::Srq(srq) => self.srqs.get(&srq).map(|s| s.ptr().cast()),
            Element::Port(port) => Some(ptr::without_provenance_mut(port as usize)),
        };
        RawEvent {
            element: object.unwrap_or(ptr::null_mut()),
            number: event.number,
        }
    }
}

/// `ibv_get_async_event(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_get_async_event(
    context: *mut ibv_context,
    event: *mut ibv_async_event,
) -> c_int {
    minus_one(enter_blocking("ibv_get_async_event", |w| {
        let events = &mut w.context(context)?.events;
        let Some(got) = events.pop() else {
            return if events.is_nonblocking() {
                Err(libc::EAGAIN)
            } else {
                Ok(None)
            };
        };
        if let Some(unacked) = w.unacked_of(context.addr(), got.element) {
            *unacked += 1;
        }
        // SAFETY: C requires `event` to be writable; RawEvent has its layout.
        unsafe { event.cast::<RawEvent>().write(w.raw_event(got)) };
        Ok(Some(()))
    }))
}

/// `ibv_ack_async_event(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    let _ = enter("ibv_ack_async_event", |w| {
        let raw = event.cast::<RawEvent>();
        let number = get!(raw, number);
        let object = get!(raw, element).addr();
        let found = [
            Element::Cq(object),
            Element::Qp(object),
            Element::Srq(object),
        ]
        .into_iter()
        .find(|&element| w.unacked_of(0, element).is_some());
        match found {
            Some(element) => w.ack(0, element),
            None => w.ack_port_event(number),
        }
        Ok(())
    });
}

impl World {
    fn ack(&mut self, context: usize, element: Element) {
        match self.unacked_of(context, element) {
            Some(unacked) if *unacked > 0 => *unacked -= 1,
            _ => self.violation("an async event was acked twice"),
        }
    }

    /// The event does not say which context it came from: any that waits for an ack will do.
    fn ack_port_event(&mut self, number: u32) {
        match self.contexts.values_mut().find(|c| c.unacked > 0) {
            Some(context) => context.unacked -= 1,
            None => self.violation(format_args!(
                "async event {number} is about no live object, or was acked twice"
            )),
        }
    }
}
