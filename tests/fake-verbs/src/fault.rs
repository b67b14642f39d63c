//! The fault plan: which calls fail, when and how.

use std::collections::BTreeMap;

use crate::world::Outcome;

/// How a call counts in the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Makes, changes or queries something: counted by [`Fabric::fail_call_number`](crate::Fabric::fail_call_number).
    Make,
    /// Gives something back: counted by [`Fabric::fail_destroy_number`](crate::Fabric::fail_destroy_number).
    Destroy,
    /// Looks for news, and is called as often as the application likes: only [`Fabric::fail_nth`](crate::Fabric::fail_nth) reaches it.
    Poll,
}

#[derive(Default)]
pub(crate) struct Faults {
    by_name: BTreeMap<&'static str, Vec<(u64, i32)>>,
    counts: BTreeMap<&'static str, u64>,
    make: Counter,
    destroy: Counter,
    pub(crate) refuse_post: Option<RefusedPost>,
    /// A destroy failed by plan: what it leaves behind is no fault of the application.
    pub(crate) destroy_failed: bool,
    pub(crate) fired: Vec<&'static str>,
}

#[derive(Clone, Copy)]
pub(crate) struct RefusedPost {
    pub(crate) call: &'static str,
    pub(crate) index: usize,
    pub(crate) errno: i32,
}

#[derive(Default)]
struct Counter {
    calls: u64,
    fail: Option<(u64, i32)>,
}

impl Counter {
    fn count(&mut self) -> Option<i32> {
        let number = self.calls;
        self.calls += 1;
        self.fail
            .filter(|&(nth, _)| nth == number)
            .map(|(_, errno)| errno)
    }
}

impl Faults {
    pub(crate) fn fail_nth(&mut self, call: &'static str, nth: u64, errno: i32) {
        let from = self.counts.get(call).copied().unwrap_or(0);
        self.by_name
            .entry(call)
            .or_default()
            .push((from + nth, errno));
    }

    pub(crate) fn fail_call_number(&mut self, number: u64, errno: i32) {
        self.make.fail = Some((number, errno));
    }

    pub(crate) fn fail_destroy_number(&mut self, number: u64, errno: i32) {
        self.destroy.fail = Some((number, errno));
    }

    pub(crate) fn calls_made(&self) -> u64 {
        self.make.calls
    }

    pub(crate) fn destroys_made(&self) -> u64 {
        self.destroy.calls
    }

    pub(crate) fn count_of(&self, call: &str) -> u64 {
        self.counts.get(call).copied().unwrap_or(0)
    }

    pub(crate) fn clear(&mut self) {
        self.by_name.clear();
        self.make.fail = None;
        self.destroy.fail = None;
        self.refuse_post = None;
    }

    /// Counts the call; an error if the plan wants it to fail.
    pub(crate) fn admit(&mut self, call: &'static str) -> Outcome<()> {
        let count = self.counts.entry(call).or_default();
        let number = *count;
        *count += 1;
        // Calls that return nothing cannot fail.
        let Some(kind) = kind_of(call) else {
            return Ok(());
        };
        let by_name = self.by_name.get_mut(call).and_then(|plan| {
            let at = plan.iter().position(|&(nth, _)| nth == number)?;
            Some(plan.swap_remove(at).1)
        });
        let by_number = match kind {
            Kind::Make => self.make.count(),
            Kind::Destroy => self.destroy.count(),
            Kind::Poll => None,
        };
        match by_name.or(by_number) {
            None => Ok(()),
            Some(errno) => {
                // A disconnect that fails leaves nothing behind.
                self.destroy_failed |= kind == Kind::Destroy && call != "rdma_disconnect";
                self.fired.push(call);
                Err(errno)
            }
        }
    }
}

/// The name in the table of calls, if there is such a call.
pub(crate) fn known(call: &str) -> Option<&'static str> {
    CALLS
        .iter()
        .find(|(name, _)| *name == call)
        .map(|(name, _)| *name)
}

fn kind_of(call: &str) -> Option<Kind> {
    CALLS
        .iter()
        .find(|(name, _)| *name == call)
        .map(|(_, kind)| *kind)
}

/// Every call a plan can make fail.
pub(crate) const CALLS: &[(&str, Kind)] = &[
    ("ibv_get_device_list", Kind::Make),
    ("ibv_open_device", Kind::Make),
    ("ibv_close_device", Kind::Destroy),
    ("ibv_query_device", Kind::Make),
    ("ibv_query_device_ex", Kind::Make),
    ("ibv_query_port", Kind::Make),
    ("ibv_query_gid", Kind::Make),
    ("ibv_query_gid_ex", Kind::Make),
    ("ibv_query_gid_table", Kind::Make),
    ("ibv_query_pkey", Kind::Make),
    ("ibv_get_pkey_index", Kind::Make),
    ("ibv_get_async_event", Kind::Poll),
    ("ibv_alloc_pd", Kind::Make),
    ("ibv_dealloc_pd", Kind::Destroy),
    ("ibv_reg_mr", Kind::Make),
    ("ibv_reg_mr_iova", Kind::Make),
    ("ibv_reg_mr_iova2", Kind::Make),
    ("ibv_reg_dmabuf_mr", Kind::Make),
    ("ibv_rereg_mr", Kind::Make),
    ("ibv_dereg_mr", Kind::Destroy),
    ("ibv_advise_mr", Kind::Make),
    ("ibv_alloc_mw", Kind::Make),
    ("ibv_dealloc_mw", Kind::Destroy),
    ("ibv_bind_mw", Kind::Make),
    ("ibv_create_comp_channel", Kind::Make),
    ("ibv_destroy_comp_channel", Kind::Destroy),
    ("ibv_get_cq_event", Kind::Poll),
    ("ibv_create_cq", Kind::Make),
    ("ibv_resize_cq", Kind::Make),
    ("ibv_modify_cq", Kind::Make),
    ("ibv_destroy_cq", Kind::Destroy),
    ("ibv_poll_cq", Kind::Poll),
    ("ibv_req_notify_cq", Kind::Make),
    ("ibv_create_srq", Kind::Make),
    ("ibv_modify_srq", Kind::Make),
    ("ibv_query_srq", Kind::Make),
    ("ibv_destroy_srq", Kind::Destroy),
    ("ibv_post_srq_recv", Kind::Make),
    ("ibv_create_qp", Kind::Make),
    ("ibv_modify_qp", Kind::Make),
    ("ibv_query_qp", Kind::Make),
    ("ibv_destroy_qp", Kind::Destroy),
    ("ibv_post_send", Kind::Make),
    ("ibv_post_recv", Kind::Make),
    ("ibv_create_ah", Kind::Make),
    ("ibv_create_ah_from_wc", Kind::Make),
    ("ibv_init_ah_from_wc", Kind::Make),
    ("ibv_destroy_ah", Kind::Destroy),
    ("ibv_attach_mcast", Kind::Make),
    ("ibv_detach_mcast", Kind::Destroy),
    ("ibv_fork_init", Kind::Make),
    ("rdma_create_event_channel", Kind::Make),
    ("rdma_create_id", Kind::Make),
    ("rdma_destroy_id", Kind::Destroy),
    ("rdma_bind_addr", Kind::Make),
    ("rdma_resolve_addr", Kind::Make),
    ("rdma_resolve_route", Kind::Make),
    ("rdma_connect", Kind::Make),
    ("rdma_listen", Kind::Make),
    ("rdma_accept", Kind::Make),
    ("rdma_reject", Kind::Make),
    ("rdma_establish", Kind::Make),
    ("rdma_notify", Kind::Make),
    ("rdma_disconnect", Kind::Destroy),
    ("rdma_migrate_id", Kind::Make),
    ("rdma_get_cm_event", Kind::Poll),
    ("rdma_init_qp_attr", Kind::Make),
    ("rdma_get_devices", Kind::Make),
    ("rdma_set_option", Kind::Make),
    ("rdma_getaddrinfo", Kind::Make),
    ("rdma_join_multicast", Kind::Make),
    ("rdma_join_multicast_ex", Kind::Make),
    ("rdma_leave_multicast", Kind::Destroy),
    ("rdma_set_local_ece", Kind::Make),
    ("rdma_get_remote_ece", Kind::Make),
];
