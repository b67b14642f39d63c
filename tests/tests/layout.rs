//! The structs of rdma-sys that the crates touch, against the system's headers.
//!
//! Some of them are written by hand in rdma-sys, and all were made from the headers of the machine
//! that built it; a C program compiled here and now says what the library really uses.
#![allow(clippy::unwrap_used)] // a test may panic

use std::fmt::Write as _;
use std::mem::{offset_of, size_of};
use std::path::Path;
use std::process::Command;

/// A struct: its name, its size, and its fields by their names in C, with their offsets in Rust.
type Layout = (&'static str, usize, Vec<(&'static str, usize)>);

/// Lists structs with fields. A field whose name in C is another is followed by `= "name in C"`.
macro_rules! layouts {
    ($($name:ident { $($($field:ident).+ $(= $c:literal)?),* $(,)? })*) => {
        vec![$((
            stringify!($name),
            size_of::<rdma_sys::$name>(),
            vec![$((
                c_name(stringify!($($field).+), [$($c)?]),
                offset_of!(rdma_sys::$name, $($field).+),
            )),*],
        )),*]
    };
}

fn c_name<const N: usize>(rust: &'static str, c: [&'static str; N]) -> &'static str {
    c.first().copied().unwrap_or(rust)
}

fn layouts() -> Vec<Layout> {
    layouts! {
        ibv_device { node_type, transport_type, name, dev_name, dev_path, ibdev_path }
        ibv_device_attr {
            fw_ver, node_guid, sys_image_guid, max_mr_size, page_size_cap, vendor_id, vendor_part_id,
            hw_ver, max_qp, max_qp_wr, device_cap_flags, max_sge, max_sge_rd, max_cq, max_cqe, max_mr,
            max_pd, max_qp_rd_atom, max_res_rd_atom, max_qp_init_rd_atom, atomic_cap, max_mw,
            max_mcast_grp, max_mcast_qp_attach, max_ah, max_srq, max_srq_wr, max_srq_sge, max_pkeys,
            local_ca_ack_delay, phys_port_cnt,
        }
        ibv_device_attr_ex { orig_attr, comp_mask, odp_caps, odp_caps.general_caps }
        ibv_context {
            device, ops, ops.alloc_mw, ops.dealloc_mw, ops.poll_cq, ops.req_notify_cq,
            ops.post_srq_recv, ops.post_send, ops.post_recv, cmd_fd, async_fd, num_comp_vectors,
            abi_compat,
        }
        verbs_context { query_port, modify_cq, query_device_ex, sz, context }
        ibv_port_attr {
            state, max_mtu, active_mtu, gid_tbl_len, port_cap_flags, max_msg_sz, pkey_tbl_len, lid,
            sm_lid, active_width, active_speed, phys_state, link_layer, flags, port_cap_flags2,
        }
        ibv_pd { context, handle }
        ibv_mr { context, pd, addr, length, handle, lkey, rkey }
        ibv_mw { context, pd, rkey, handle, type_ = "type" }
        ibv_mw_bind_info { mr, addr, length, mw_access_flags }
        ibv_comp_channel { context, fd }
        ibv_cq { context, channel, cq_context, handle, cqe }
        ibv_modify_cq_attr { attr_mask, moderate, moderate.cq_count, moderate.cq_period }
        ibv_srq { context, srq_context, pd, handle }
        ibv_srq_attr { max_wr, max_sge, srq_limit }
        ibv_srq_init_attr { srq_context, attr }
        ibv_qp { context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type }
        ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
        ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
        ibv_qp_attr {
            qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num,
            qp_access_flags, cap, ah_attr, alt_ah_attr, pkey_index, alt_pkey_index,
            en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer,
            port_num, timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout, rate_limit,
        }
        ibv_global_route { dgid, flow_label, sgid_index, hop_limit, traffic_class }
        ibv_ah_attr { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num }
        ibv_ah { context, pd, handle }
        ibv_grh { version_tclass_flow, paylen, next_hdr, hop_limit, sgid, dgid }
        ibv_sge { addr, length, lkey }
        ibv_recv_wr { wr_id, next, sg_list, num_sge }
        ibv_send_wr {
            wr_id, next, sg_list, num_sge, opcode, send_flags,
            imm_data_invalidated_rkey_union.imm_data = "imm_data",
            imm_data_invalidated_rkey_union.invalidated_rkey = "invalidate_rkey",
            wr.rdma.remote_addr, wr.rdma.rkey,
            wr.atomic.remote_addr, wr.atomic.compare_add, wr.atomic.swap, wr.atomic.rkey,
            wr.ud.ah, wr.ud.remote_qpn, wr.ud.remote_qkey,
            qp_type.xrc.remote_srqn,
            bind_mw_tso_union.bind_mw.mw = "bind_mw.mw",
            bind_mw_tso_union.bind_mw.rkey = "bind_mw.rkey",
            bind_mw_tso_union.bind_mw.bind_info = "bind_mw.bind_info",
        }
        ibv_wc {
            wr_id, status, opcode, vendor_err, byte_len,
            imm_data_invalidated_rkey_union.imm_data = "imm_data",
            imm_data_invalidated_rkey_union.invalidated_rkey = "invalidated_rkey",
            qp_num, src_qp, wc_flags, pkey_index, slid, sl, dlid_path_bits,
        }
        ibv_async_event { element, element.port_num, event_type }
        rdma_event_channel { fd }
        rdma_cm_id {
            verbs, channel, context, qp, route, route.addr, ps, port_num, event, send_cq_channel,
            send_cq, recv_cq_channel, recv_cq, srq, pd, qp_type,
        }
        rdma_route { addr, path_rec, num_paths }
        rdma_addr {
            src_addr_union.src_addr = "src_addr", src_addr_union.src_storage = "src_storage",
            dst_addr_union.dst_addr = "dst_addr", dst_addr_union.dst_storage = "dst_storage",
            addr.ibaddr.sgid, addr.ibaddr.dgid, addr.ibaddr.pkey,
        }
        rdma_conn_param {
            private_data, private_data_len, responder_resources, initiator_depth, flow_control,
            retry_count, rnr_retry_count, srq, qp_num,
        }
        rdma_ud_param { private_data, private_data_len, ah_attr, qp_num, qkey }
        rdma_cm_event { id, listen_id, event, status, param.conn, param.ud }
        rdma_addrinfo {
            ai_flags, ai_family, ai_qp_type, ai_port_space, ai_src_len, ai_dst_len, ai_src_addr,
            ai_dst_addr, ai_src_canonname, ai_dst_canonname, ai_next,
        }
    }
}

#[test]
fn every_struct_we_touch_is_laid_out_as_in_the_headers() {
    let layouts = layouts();
    let in_c = run_c(&program(&layouts));
    let mut in_rust = String::new();
    for (name, size, fields) in &layouts {
        writeln!(in_rust, "{name} {size}").unwrap();
        for (field, offset) in fields {
            writeln!(in_rust, "{name}.{field} {offset}").unwrap();
        }
    }
    let wrong: Vec<_> = in_rust
        .lines()
        .zip(in_c.lines())
        .filter(|(rust, c)| rust != c)
        .collect();
    assert!(wrong.is_empty(), "in Rust, in C: {wrong:#?}");
    assert_eq!(in_rust.lines().count(), in_c.lines().count());
}

/// A C program that prints each struct's size and its fields' offsets.
fn program(layouts: &[Layout]) -> String {
    let mut text = String::from(
        "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/verbs.h>\n\
         #include <rdma/rdma_cma.h>\nint main(void) {\n",
    );
    for (name, _, fields) in layouts {
        writeln!(text, "printf(\"{name} %zu\\n\", sizeof(struct {name}));").unwrap();
        for (field, _) in fields {
            let offset = format!("offsetof(struct {name}, {field})");
            writeln!(text, "printf(\"{name}.{field} %zu\\n\", {offset});").unwrap();
        }
    }
    text + "return 0; }\n"
}

fn run_c(program: &str) -> String {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (source, binary) = (folder.join("layout.c"), folder.join("layout"));
    std::fs::write(&source, program).unwrap();
    let compiled = Command::new("cc")
        .arg(&source)
        .arg("-o")
        .arg(&binary)
        .output();
    let compiled = compiled.expect("needs a C compiler");
    assert!(
        compiled.status.success(),
        "{}",
        String::from_utf8_lossy(&compiled.stderr)
    );
    String::from_utf8(Command::new(binary).output().unwrap().stdout).unwrap()
}
