//! Verbs between two soft-RoCE devices: the scenarios of `rdma-core-rs`, and what only a real
//! kernel can show.
//!
//! Each test leaves the kernel's objects as it found them; they are counted for the whole host, so
//! the tests take turns.
#![allow(unsafe_code, clippy::unwrap_used)] // posts; a test may panic

#[path = "../../rdma-core-rs/tests/verbs/mod.rs"]
mod verbs;

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rdma_core_rs::{
    Access, AsyncEvent, CompletionQueue, Error, Pages, PortState, QpType, RegionOptions,
    RegionSlice, SendWr, SharedRegion, Srq, WcOpcode, WcStatus, WorkCompletion, devices,
};
use verbs::{Bed, End, scenarios};

/// The lab's two hosts.
const A: (&str, &str) = ("rxe0", "192.168.99.1");
const B: (&str, &str) = ("rxe1", "192.168.99.2");

/// Runs a scenario between the two hosts and sees that nothing is left of it.
fn on_rxe(scenario: impl FnOnce(&Bed)) {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let before = kernel_objects();
    let bed = Bed::open(A, B);
    scenario(&bed);
    drop(bed);
    let until = Instant::now() + Duration::from_secs(10); // the kernel frees some a little later
    while kernel_objects() != before && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(kernel_objects(), before);
}

fn kernel_objects() -> String {
    let output = Command::new("rdma").args(["resource", "show"]).output();
    let output = output.expect("needs the rdma tool of iproute2");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

macro_rules! tests {
    ($($name:ident)*) => {$(
        #[test]
        #[ignore = "needs an RDMA device: cargo xtask test"]
        fn $name() {
            on_rxe(scenarios::$name);
        }
    )*};
}

for_all_scenarios!(tests);

macro_rules! rxe_tests {
    ($(fn $name:ident($bed:ident) $body:block)*) => {$(
        #[test]
        #[ignore = "needs an RDMA device: cargo xtask test"]
        fn $name() {
            on_rxe(|$bed| $body);
        }
    )*};
}

rxe_tests! {
    fn last_request_of_a_shared_queue_is_told_by_newer_kernels(bed) {
        let events = bed.b.context.async_events().unwrap();
        let srq = Srq::new(&bed.b.pd, 16, 1).unwrap();
        let mut end = End::new(&bed.b, QpType::Rc, |config| config.srq = Some(srq.clone()));
        let peer = End::new(&bed.a, QpType::Rc, |_| {});
        end.bring_up(&peer.address());
        end.qp.to_error().unwrap();
        let told = kernel_is_at_least(6, 12);
        let silent = Instant::now() + Duration::from_secs(1);
        let event = events.wait(if told { verbs::soon() } else { Some(silent) }).unwrap();
        let last = AsyncEvent::QpLastWqeReached { qp_num: end.qp.qp_num() };
        assert_eq!(event, told.then_some(last));
    }

    fn receive_posted_in_error_is_released_with_the_queue_pair(bed) {
        let mut end = End::new(&bed.a, QpType::Rc, |_| {});
        end.init();
        end.post_recv(1, &[end.local.sge()]);
        end.qp.to_error().unwrap();
        end.expect_failure(1, WcStatus::WrFlushErr);
        // Newer kernels empty the queue in the background, and flush what is posted meanwhile, or not.
        std::thread::sleep(Duration::from_millis(200));
        end.post_recv(2, &[end.local.sge()]);
        std::thread::sleep(Duration::from_millis(200));
        let expect_no_other = |cq: &CompletionQueue| {
            let mut room = [WorkCompletion::default(); 4];
            for wc in cq.poll(&mut room).unwrap() {
                let failure = wc.success().unwrap_err();
                assert_eq!((failure.wr_id, failure.status), (2, WcStatus::WrFlushErr));
                assert!(kernel_is_at_least(6, 12), "flushed after all");
            }
        };
        expect_no_other(&end.cq);
        let End { qp, cq, local, .. } = end;
        qp.destroy().map_err(|(_, error)| error).unwrap();
        expect_no_other(&cq);
        drop(local);
    }

    fn port_that_goes_down_and_up_is_told(_bed) {
        let third = ThirdDevice::new();
        let device = devices().unwrap().into_iter().find(|device| device.name() == "rxe2");
        let context = device.expect("the new device is listed").open().unwrap();
        let events = context.async_events().unwrap();
        let wait_for = |wanted| loop {
            let event = events.wait(verbs::soon()).unwrap().expect("an event");
            if event == wanted {
                break;
            }
        };
        run("ip", &["link", "set", "w0", "down"]);
        wait_for(AsyncEvent::PortErr { port: 1 });
        assert_eq!(context.port_attr(1).unwrap().state, PortState::Down);
        run("ip", &["link", "set", "w0", "up"]);
        wait_for(AsyncEvent::PortActive { port: 1 });
        assert_eq!(context.port_attr(1).unwrap().state, PortState::Active);
        drop((events, context)); // removing the device waits for it
        drop(third);
    }

    fn multicast_groups_can_be_joined_and_left(bed) {
        let mut end = End::new(&bed.a, QpType::Ud, |_| {});
        end.init();
        let group = "ff0e::ffff:239.1.2.3".parse().unwrap();
        end.qp.attach_mcast(group, 0).unwrap();
        end.qp.detach_mcast(group, 0).unwrap();
        let mut connected = End::new(&bed.a, QpType::Rc, |_| {});
        let error = connected.qp.attach_mcast(group, 0).unwrap_err();
        assert!(matches!(error, Error::Call { call: "ibv_attach_mcast", .. }), "{error}");
    }

    fn huge_pages_carry_messages_and_are_given_back(bed) {
        let _pages = HugePages::reserve(4);
        let options = RegionOptions { pages: Pages::Huge, ..RegionOptions::default() };
        let mut slice = RegionSlice::alloc_with(&bed.a.pd, 1, &options).unwrap();
        assert!(slice.len() >= 1 << 20 && slice.len().is_power_of_two(), "{slice:?}");
        let (mut a, mut b) = bed.pair(QpType::Rc);
        slice[..4].copy_from_slice(b"huge");
        b.post_recv(1, &[b.local.sge()]);
        a.post(SendWr::send(2, &[slice.sge_range(..4).unwrap()]));
        a.expect(2, WcOpcode::Send);
        b.expect(1, WcOpcode::Recv);
        assert_eq!(&b.local[..4], b"huge");

        let access = Access::REMOTE_WRITE;
        let shared = SharedRegion::alloc_with(&bed.b.pd, 1, access, Pages::Huge).unwrap();
        a.post(SendWr::write(3, &[slice.sge_range(..4).unwrap()], shared.descriptor()));
        a.expect(3, WcOpcode::RdmaWrite);
        let mut bytes = [0; 4];
        shared.read_at(0, &mut bytes).unwrap();
        assert_eq!(&bytes, b"huge");

        let error = RegionSlice::alloc_with(&bed.a.pd, 1 << 30, &options).unwrap_err();
        assert!(matches!(error, Error::Call { call: "mmap", .. }), "{error}");
    }

    fn child_of_a_fork_leaves_the_parents_objects_alone(bed) {
        let (mut a, mut b) = bed.pair(QpType::Rc);
        // SAFETY: the test runs alone (`on_rxe`), so no other thread holds a lock.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let refused = matches!(a.qp.to_error(), Err(Error::Forked));
            drop((a, b));
            // SAFETY: ends the child without running what belongs to the parent.
            unsafe { libc::_exit(i32::from(!refused)) };
        }
        let mut status = 0;
        // SAFETY: `child` is our child and `status` a local.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!((waited, status), (child, 0));
        b.post_recv(1, &[b.local.sge()]);
        a.local[..5].copy_from_slice(b"still");
        a.post(SendWr::send(2, &[a.local.sge_range(..5).unwrap()]));
        a.expect(2, WcOpcode::Send);
        b.expect(1, WcOpcode::Recv);
        assert_eq!(&b.local[..5], b"still");
    }

    // Run on its own it just registers; `limit_on_locked_memory_is_named` runs it without the
    // right to pass the limit.
    fn mebibyte_is_registered_or_the_limit_is_named(bed) {
        let limit = memlock();
        match RegionSlice::alloc(&bed.a.pd, 1 << 20) {
            Ok(slice) => println!("registered {}", slice.len()),
            Err(error) => {
                assert!(matches!(error, Error::Memlock { asked, limit: named, .. }
                    if asked == 1 << 20 && named == limit), "{error}");
                println!("{error}");
            }
        }
        if limit >= 64 << 10 {
            RegionSlice::alloc(&bed.a.pd, 16 << 10).unwrap();
        }
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn limit_on_locked_memory_is_named() {
    for limit in ["65536", "0"] {
        let output = Command::new("setpriv")
            .args([
                "--bounding-set=-ipc_lock",
                "--inh-caps=-ipc_lock",
                "prlimit",
            ])
            .arg(format!("--memlock={limit}:{limit}"))
            .arg(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "--nocapture"])
            .arg("mebibyte_is_registered_or_the_limit_is_named")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{output:?}");
        assert!(
            text.contains("memlock") && text.contains(&format!(" is {limit} bytes")),
            "{text}"
        );
        assert!(text.contains("1 passed"), "{text}");
    }
}

// Run on its own it just opens; `device_that_may_not_be_opened_is_named` runs it without the right
// to pass over file modes.
#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn device_is_opened_or_the_file_is_named() {
    let device = devices().unwrap().remove(0);
    match device.open() {
        Ok(_) => println!("opened"),
        Err(error) => {
            assert!(matches!(error, Error::PermissionDenied { .. }), "{error}");
            println!("{error}");
        }
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn device_that_may_not_be_opened_is_named() {
    let files: Vec<_> = std::fs::read_dir("/dev/infiniband")
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.to_string_lossy().contains("uverbs"))
        .map(|path| (path.clone(), path.metadata().unwrap().permissions()))
        .collect();
    for (path, _) in &files {
        std::fs::set_permissions(path, Permissions::from_mode(0o000)).unwrap();
    }
    let output = Command::new("setpriv")
        .args(["--bounding-set=-dac_override,-dac_read_search"])
        .args(["--inh-caps=-dac_override,-dac_read_search"])
        .arg(std::env::current_exe().unwrap())
        .args([
            "--ignored",
            "--exact",
            "--nocapture",
            "device_is_opened_or_the_file_is_named",
        ])
        .output();
    for (path, permissions) in files {
        std::fs::set_permissions(path, permissions).unwrap();
    }
    let text = String::from_utf8(output.unwrap().stdout).unwrap();
    assert!(
        text.contains("no permission to open /dev/infiniband/uverbs"),
        "{text}"
    );
}

/// One more device, so that the hosts of the other tests are left in peace.
struct ThirdDevice;

impl ThirdDevice {
    fn new() -> ThirdDevice {
        run(
            "ip",
            &["link", "add", "w0", "type", "veth", "peer", "name", "w1"],
        );
        let device = ThirdDevice; // from here on, dropping it cleans up
        run("ip", &["link", "set", "w1", "up"]);
        run("ip", &["link", "set", "w0", "up"]);
        run(
            "rdma",
            &["link", "add", "rxe2", "type", "rxe", "netdev", "w0"],
        );
        device
    }
}

impl Drop for ThirdDevice {
    fn drop(&mut self) {
        run("ip", &["link", "del", "w0"]); // and the RDMA device with it
    }
}

fn run(program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).status();
    assert!(status.unwrap().success(), "{program} {arguments:?}");
}

fn kernel_is_at_least(major: u32, minor: u32) -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release
        .split('.')
        .map(|number| number.parse::<u32>().unwrap_or(0));
    (numbers.next().unwrap(), numbers.next().unwrap()) >= (major, minor)
}

fn memlock() -> u64 {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is a local that the function fills in.
    let ret = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    assert_eq!(ret, 0);
    limit.rlim_cur
}

/// Huge pages in the system's pool, for as long as this lives.
struct HugePages {
    before: String,
}

impl HugePages {
    const FILE: &str = "/proc/sys/vm/nr_hugepages";

    fn reserve(count: u32) -> HugePages {
        let before = std::fs::read_to_string(Self::FILE).unwrap();
        let total = before.trim().parse::<u32>().unwrap() + count;
        std::fs::write(Self::FILE, total.to_string()).unwrap();
        HugePages { before }
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        std::fs::write(Self::FILE, &self.before).unwrap();
    }
}
