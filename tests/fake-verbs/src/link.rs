//! Makes sure that the fake symbols are the ones the test binary got.

/// Panics if the C symbols the bindings call are not this crate's.
pub(crate) fn assert_linked() {
    // Miri gives a function a fresh address at each use; there is no shared library there anyway.
    if cfg!(miri) {
        return;
    }
    let pairs: [(*const (), *const ()); 4] = [
        (
            rdma_sys::ibv_alloc_pd as *const (),
            crate::pd::ibv_alloc_pd as *const (),
        ),
        (
            rdma_sys::ibv_create_qp as *const (),
            crate::qp::ibv_create_qp as *const (),
        ),
        (
            rdma_sys::ibv_reg_mr as *const (),
            crate::mr::ibv_reg_mr as *const (),
        ),
        (
            rdma_sys::rdma_get_cm_event as *const (),
            crate::cm::get_cm_event as *const (),
        ),
    ];
    for (bound, ours) in pairs {
        assert_eq!(
            bound, ours,
            "the shared library's symbols were linked instead of the fake ones"
        );
    }
}
