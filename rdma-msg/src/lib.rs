//! RDMA endpoints.
