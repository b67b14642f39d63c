//! d04: whatever has been built, in whatever order it is dropped, nothing panics and nothing is left.
//!
//! The report is of a program that returned early after it had built a queue pair and before it had
//! connected it. So the objects of a connection are built up to step k, for every k, and dropped in
//! many orders; also by `?` out of the middle, and while a panic unwinds.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rdma_cm::{ConnParam, Connector, ListenOptions, Listener};
use rdma_core_rs::{
    Access, CompletionChannel, CompletionQueue, ProtectionDomain, QpConfig, QueuePair, RegionSlice,
    SharedRegion,
};

use crate::support::{assert_no_leak, baseline, rounds, serial, server_addr};

type Built = Vec<Box<dyn Any>>;
const STEPS: usize = 9;

/// Builds the first `steps` objects of a connection, each independent of the others' order of drop.
fn build(steps: usize, listener: &Listener) -> Result<Built, Box<dyn std::error::Error>> {
    let mut built: Built = Vec::new();
    let resolved = Connector::new(listener.local_addr()).resolve()?;
    let context = resolved.context();
    built.push(Box::new(context.clone()));
    if steps == 1 {
        return Ok(built);
    }
    let pd = ProtectionDomain::new(&context)?;
    built.push(Box::new(pd.clone()));
    if steps == 2 {
        return Ok(built);
    }
    let channel = CompletionChannel::new(&context)?;
    built.push(Box::new(channel.clone()));
    if steps == 3 {
        return Ok(built);
    }
    let cq = CompletionQueue::new(&context, 16, Some(&channel))?;
    built.push(Box::new(cq.clone()));
    if steps == 4 {
        return Ok(built);
    }
    built.push(Box::new(RegionSlice::alloc(&pd, 4096)?));
    if steps == 5 {
        return Ok(built);
    }
    built.push(Box::new(SharedRegion::alloc(
        &pd,
        4096,
        Access::REMOTE_WRITE,
    )?));
    if steps == 6 {
        return Ok(built);
    }
    let mut qp = QueuePair::new(&pd, &QpConfig::rc(&cq, &cq))?;
    if steps == 7 {
        built.push(Box::new(qp));
        built.push(Box::new(resolved));
        return Ok(built);
    }
    let connecting = resolved.connect(&mut qp, &ConnParam::default())?;
    built.push(Box::new(qp));
    built.push(Box::new(connecting));
    Ok(built)
}

/// The orders to drop `count` objects in: forward, reverse, and some random ones.
fn orders(count: usize, random: usize) -> Vec<Vec<usize>> {
    let forward: Vec<usize> = (0..count).collect();
    let mut orders = vec![forward.clone(), forward.iter().rev().copied().collect()];
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    for _ in 0..random {
        let mut order = forward.clone();
        for last in (1..count).rev() {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            order.swap(last, (state % (last as u64 + 1)) as usize);
        }
        orders.push(order);
    }
    orders
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d04_anything_half_built_can_be_dropped_in_any_order() {
    let _one = serial();
    let before = baseline();
    let listener = Listener::bind(server_addr(), &ListenOptions::default()).unwrap();
    for steps in 1..STEPS {
        for order in orders(build(steps, &listener).unwrap().len(), rounds(60, 3)) {
            let mut built: Vec<Option<Box<dyn Any>>> = build(steps, &listener)
                .unwrap()
                .into_iter()
                .map(Some)
                .collect();
            for index in order {
                drop(built[index].take());
            }
        }
    }
    drop(listener);
    assert_no_leak(&before);
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d04_leaving_early_and_unwinding_leak_nothing() {
    let _one = serial();
    let before = baseline();
    let listener = Listener::bind(server_addr(), &ListenOptions::default()).unwrap();
    for steps in 1..STEPS {
        let early = || -> Result<(), Box<dyn std::error::Error>> {
            let _built = build(steps, &listener)?;
            Err("something else went wrong")?
        };
        early().unwrap_err();
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            let _built = build(steps, &listener).unwrap();
            panic!("d04: on purpose");
        }));
        unwound.unwrap_err();
    }
    drop(listener);
    assert_no_leak(&before);
}
