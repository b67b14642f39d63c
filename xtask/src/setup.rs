//! What the workspace needs from the system, and its installation.
//!
//! Each need is looked for by what it provides (a header, a program), not by its package, so that a system
//! that has it in another way passes. What is missing is installed on Debian and Ubuntu, after asking.

use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::io::{self, BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What is going to be done, which decides what is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Compile the workspace.
    Build,
    /// Boot the lab.
    Lab,
    /// Run the tests against other RDMA programs.
    Test,
    /// Measure other RDMA programs too.
    Bench,
    /// Count instructions without a guest.
    Instructions,
    /// Read kernel modules that are packed with zstd.
    Zstd,
}

impl Purpose {
    /// All that this program can do.
    pub(crate) const ALL: &[Purpose] = &[
        Purpose::Build,
        Purpose::Lab,
        Purpose::Test,
        Purpose::Bench,
        Purpose::Instructions,
        Purpose::Zstd,
    ];
}

/// Whether the user agrees to changes of the system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Consent {
    /// Given beforehand, by `--yes` or `CI=true`.
    Given,
    /// To be asked for.
    Ask,
}

impl Consent {
    pub(crate) fn new(yes: bool) -> Consent {
        if yes || is_ci() {
            Consent::Given
        } else {
            Consent::Ask
        }
    }
}

/// Whether this runs in continuous integration, where nobody can answer.
pub(crate) fn is_ci() -> bool {
    std::env::var_os("CI").is_some_and(|value| value == "true")
}

/// Installs what is missing for the purposes.
///
/// # Errors
/// If something is missing and cannot be installed, or the user does not agree. The message has the names of
/// the packages.
pub(crate) fn ensure_installed(purposes: &[Purpose], consent: Consent) -> Result<()> {
    let missing: Vec<&Need> = needs_of(purposes).filter(|need| !(need.found)()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    for need in &missing {
        eprintln!("setup: missing: {}", need.what);
    }
    let packages = packages_of(&missing)?;
    install(&packages, consent)?;
    let still: Vec<&str> = missing
        .iter()
        .filter(|need| !(need.found)())
        .map(|need| need.what)
        .collect();
    ensure!(
        still.is_empty(),
        "still missing after the installation: {}",
        still.join(", ")
    );
    Ok(())
}

/// Fetches apt's lists of packages, if that is possible without asking for more than was agreed to.
pub(crate) fn update_lists() -> Result<()> {
    eprintln!("setup: apt-get update");
    apt_get(&["update"])
}

// ---- what is needed --------------------------------------------------------------------------------

/// One thing that the system must provide.
struct Need {
    what: &'static str,
    purposes: &'static [Purpose],
    found: fn() -> bool,
    /// The packages that provide it on Debian and Ubuntu; the first that is offered is taken.
    debian: &'static [&'static str],
}

const NEEDS: &[Need] = &[
    Need {
        what: "the headers of libibverbs",
        purposes: &[Purpose::Build],
        found: || header("infiniband/verbs.h"),
        debian: &["libibverbs-dev"],
    },
    Need {
        what: "the headers of librdmacm",
        purposes: &[Purpose::Build],
        found: || header("rdma/rdma_cma.h"),
        debian: &["librdmacm-dev"],
    },
    Need {
        what: "pkg-config",
        purposes: &[Purpose::Build],
        found: || program("pkg-config"),
        debian: &["pkg-config"],
    },
    Need {
        what: "libclang 14 or 15 (rdma-sys 0.3 fails with newer ones)",
        purposes: &[Purpose::Build],
        found: || !matches!(Libclang::here(), Libclang::Missing | Libclang::TooNew),
        debian: &["libclang-14-dev", "libclang-15-dev"],
    },
    Need {
        what: "QEMU for x86",
        purposes: &[Purpose::Lab],
        found: || program("qemu-system-x86_64"),
        debian: &["qemu-system-x86"],
    },
    Need {
        what: "a static busybox",
        purposes: &[Purpose::Lab],
        found: || crate::lab::has_busybox(),
        debian: &["busybox-static"],
    },
    Need {
        what: "ip, tc and rdma of iproute2",
        purposes: &[Purpose::Lab],
        found: || ["ip", "tc", "rdma"].iter().all(|name| program(name)),
        debian: &["iproute2"],
    },
    Need {
        what: "the user-space driver of soft-RoCE",
        purposes: &[Purpose::Lab],
        found: || Path::new("/etc/libibverbs.d/rxe.driver").exists(),
        debian: &["ibverbs-providers"],
    },
    Need {
        what: "xz",
        purposes: &[Purpose::Lab],
        found: || program("xz"),
        debian: &["xz-utils"],
    },
    Need {
        what: "rping and its like",
        purposes: &[Purpose::Test],
        found: || program("rping"),
        debian: &["rdmacm-utils"],
    },
    Need {
        what: "strace",
        purposes: &[Purpose::Test],
        found: || program("strace"),
        debian: &["strace"],
    },
    Need {
        what: "ib_send_lat and its like",
        purposes: &[Purpose::Bench],
        found: || program("ib_send_lat"),
        debian: &["perftest"],
    },
    Need {
        what: "ibv_rc_pingpong and its like",
        purposes: &[Purpose::Test, Purpose::Bench],
        found: || program("ibv_rc_pingpong"),
        debian: &["ibverbs-utils"],
    },
    Need {
        what: "valgrind",
        purposes: &[Purpose::Instructions],
        found: || program("valgrind"),
        debian: &["valgrind"],
    },
    Need {
        what: "zstd, with which the kernel's modules are packed",
        purposes: &[Purpose::Zstd],
        found: || program("zstd"),
        debian: &["zstd"],
    },
];

fn needs_of(purposes: &[Purpose]) -> impl Iterator<Item = &'static Need> {
    NEEDS.iter().filter(|need| {
        need.purposes
            .iter()
            .any(|purpose| purposes.contains(purpose))
    })
}

fn header(name: &str) -> bool {
    Path::new("/usr/include").join(name).exists()
}

/// Whether a program can be found, in the folders of the system's administrator too.
pub(crate) fn program(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(system)
        .any(|folder| folder.join(name).is_file())
}

// ---- libclang --------------------------------------------------------------------------------------

/// What bindgen 0.59, which rdma-sys 0.3 uses, finds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Libclang {
    /// The one that would be taken works, or the user has chosen one with `LIBCLANG_PATH`.
    Good,
    /// A newer one would be taken; this folder has one that works.
    Beside(PathBuf),
    /// There are only newer ones.
    TooNew,
    Missing,
}

/// The first version of libclang that bindgen 0.59 cannot read.
const TOO_NEW: u32 = 16;

impl Libclang {
    pub(crate) fn here() -> Libclang {
        if std::env::var_os("LIBCLANG_PATH").is_some() {
            return Libclang::Good;
        }
        let llvm = fs::read_dir("/usr/lib").into_iter().flatten().flatten();
        let llvm = llvm.filter(|entry| entry.file_name().to_string_lossy().starts_with("llvm"));
        let common = [
            "/usr/lib64",
            "/usr/lib",
            "/usr/local/lib",
            "/usr/lib/x86_64-linux-gnu",
        ];
        let folders = llvm
            .map(|entry| entry.path().join("lib"))
            .chain(common.map(PathBuf::from));
        Libclang::choose(
            folders
                .filter_map(|folder| Some((newest_in(&folder)?, folder)))
                .collect(),
        )
    }

    /// clang-sys takes the newest.
    fn choose(mut installed: Vec<(u32, PathBuf)>) -> Libclang {
        installed.sort();
        let newest = installed.last().map(|(version, _)| *version);
        let good = installed
            .into_iter()
            .rev()
            .find(|(version, _)| *version < TOO_NEW);
        match (newest, good) {
            (None, _) => Libclang::Missing,
            (Some(newest), _) if newest < TOO_NEW => Libclang::Good,
            (_, Some((_, folder))) => Libclang::Beside(folder),
            _ => Libclang::TooNew,
        }
    }
}

/// The newest libclang in a folder, which is the one that is taken from there.
fn newest_in(folder: &Path) -> Option<u32> {
    let files = fs::read_dir(folder).into_iter().flatten().flatten();
    files
        .filter_map(|entry| libclang_version(entry.file_name().to_str()?))
        .max()
}

/// The major version in `libclang-14.so.1`, `libclang-14.0.6.so` or `libclang.so.15.0.7`.
fn libclang_version(file: &str) -> Option<u32> {
    let rest = file
        .strip_prefix("libclang-")
        .or_else(|| file.strip_prefix("libclang.so."))?;
    let is_library = file.contains(".so");
    let version = rest.split('.').next()?.parse().ok()?;
    // libclang.so.1 is the name of the interface, not a version.
    (is_library && version > 1).then_some(version)
}

// ---- packages --------------------------------------------------------------------------------------

/// The packages to install, of which apt must offer one for each need.
fn packages_of(missing: &[&Need]) -> Result<Vec<&'static str>> {
    if !is_debian() {
        let names: Vec<&str> = missing.iter().map(|need| need.debian[0]).collect();
        bail!(
            "this is no Debian or Ubuntu: install what these packages of Debian hold, and run this \
             again: {}",
            names.join(" ")
        );
    }
    let is_offered = |package: &str| is_downloadable(&[package]);
    match choose_offered(missing, is_offered) {
        Ok(packages) => Ok(packages),
        // A new system has no lists yet.
        Err(_) => {
            update_lists()?;
            choose_offered(missing, is_offered)
        }
    }
}

fn choose_offered(
    missing: &[&Need],
    is_offered: impl Fn(&str) -> bool,
) -> Result<Vec<&'static str>> {
    let choose = |need: &&Need| {
        let mut names = need.debian.iter().copied();
        let package = names.find(|package| is_offered(package));
        package.with_context(|| {
            let names = need.debian.join(" or ");
            format!(
                "apt offers no package {names}, which is needed for {}",
                need.what
            )
        })
    };
    missing.iter().map(choose).collect()
}

/// Whether apt knows where to download all these packages. Asks nobody else for it, and fetches nothing.
///
/// That apt knows a package's name is not enough: it may be installed, or have been, from nowhere.
pub(crate) fn is_downloadable(packages: &[&str]) -> bool {
    let mut command = Command::new("apt-get");
    let command = command.args(["-q", "download", "--print-uris"]);
    let output = command.args(packages).output();
    output.is_ok_and(|output| output.status.success())
}

fn is_debian() -> bool {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    names_debian(&release) && program("apt-get")
}

fn names_debian(os_release: &str) -> bool {
    os_release
        .lines()
        .filter_map(|line| line.split_once('='))
        .any(|(key, value)| {
            let mut words = value.trim_matches('"').split(' ');
            matches!(key, "ID" | "ID_LIKE") && words.any(|word| matches!(word, "debian" | "ubuntu"))
        })
}

fn install(packages: &[&str], consent: Consent) -> Result<()> {
    let list = packages.join(" ");
    eprintln!("setup: going to install: {list}");
    if consent == Consent::Ask && !agreed()? {
        bail!("not installed; to do it yourself: apt-get install {list}");
    }
    let mut arguments = vec!["install", "-y", "--no-install-recommends"];
    arguments.extend(packages);
    // The lists may name versions that the archive has replaced since.
    apt_get(&arguments)
        .or_else(|_| {
            update_lists()?;
            apt_get(&arguments)
        })
        .with_context(|| format!("to install them yourself: apt-get install {list}"))
}

fn agreed() -> Result<bool> {
    if !io::stdin().is_terminal() {
        eprintln!("setup: no terminal to ask on: say --yes to agree");
        return Ok(false);
    }
    eprint!("setup: go on? [y/N] ");
    io::stderr().flush()?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

/// Runs apt-get with the rights to change the system, its output on standard error.
fn apt_get(arguments: &[&str]) -> Result<()> {
    let mut command = as_root("apt-get")?;
    command.args(["-q", "-o", "Dpkg::Use-Pty=0"]);
    let status = command
        .args(arguments)
        .stdout(Stdio::from(io::stderr()))
        .status()
        .with_context(|| format!("cannot run {command:?}"))?;
    ensure!(status.success(), "apt-get {} failed", arguments[0]);
    Ok(())
}

/// A command with the rights of root.
///
/// # Errors
/// If this is not root and there is no sudo.
pub(crate) fn as_root(name: &str) -> Result<Command> {
    if is_root() {
        let mut command = Command::new(name);
        command.env("DEBIAN_FRONTEND", "noninteractive");
        return Ok(command);
    }
    if !program("sudo") {
        bail!("this needs root's rights, and there is no sudo");
    }
    let mut command = Command::new("sudo");
    if !io::stdin().is_terminal() {
        command.arg("-n"); // fails instead of asking for a password
    }
    command.args(["env", "DEBIAN_FRONTEND=noninteractive", name]);
    Ok(command)
}

fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn versions(installed: &[u32]) -> Vec<(u32, PathBuf)> {
        installed
            .iter()
            .map(|v| (*v, PathBuf::from(format!("/usr/lib/llvm-{v}/lib"))))
            .collect()
    }

    #[test]
    fn an_old_libclang_is_chosen_beside_a_new_one() {
        assert_eq!(Libclang::choose(versions(&[14])), Libclang::Good);
        assert_eq!(Libclang::choose(versions(&[])), Libclang::Missing);
        assert_eq!(Libclang::choose(versions(&[16, 19])), Libclang::TooNew);
        let beside = Libclang::Beside("/usr/lib/llvm-15/lib".into());
        assert_eq!(Libclang::choose(versions(&[14, 15, 16])), beside);
    }

    #[test]
    fn the_version_of_a_libclang_is_in_its_name() {
        assert_eq!(libclang_version("libclang-14.so.1"), Some(14));
        assert_eq!(libclang_version("libclang-14.0.6.so"), Some(14));
        assert_eq!(libclang_version("libclang.so.15.0.7"), Some(15));
        assert_eq!(libclang_version("libclang.so.1"), None);
        assert_eq!(libclang_version("libclang-cpp.so.14"), None);
    }

    #[test]
    fn only_what_the_command_uses_is_asked_for() {
        let packages = |purposes: &[Purpose]| {
            let needs = needs_of(purposes);
            needs.map(|need| need.debian[0]).collect::<Vec<_>>()
        };
        let lab = packages(&[Purpose::Build, Purpose::Lab]);
        assert!(!lab.contains(&"zstd") && !lab.contains(&"valgrind"));
        assert_eq!(packages(&[Purpose::Zstd]), ["zstd"]);
        assert_eq!(packages(&[Purpose::Instructions]), ["valgrind"]);
        assert_eq!(packages(Purpose::ALL).len(), NEEDS.len());
    }

    #[test]
    fn relatives_of_debian_are_recognised() {
        assert!(names_debian("NAME=\"Debian GNU/Linux\"\nID=debian\n"));
        assert!(names_debian("ID=linuxmint\nID_LIKE=\"ubuntu debian\"\n"));
        assert!(!names_debian("ID=fedora\nNAME=\"not debian\"\n"));
    }

    #[test]
    fn the_first_package_on_offer_is_taken_for_each_need() {
        let need = Need {
            what: "x",
            purposes: &[],
            found: || false,
            debian: &["libclang-14-dev", "libclang-15-dev"],
        };
        let choose = |offer: &[&str]| choose_offered(&[&need], |name| offer.contains(&name));
        let both = ["libclang-15-dev", "libclang-14-dev"];
        assert_eq!(choose(&both).unwrap(), ["libclang-14-dev"]);
        assert_eq!(choose(&["libclang-15-dev"]).unwrap(), ["libclang-15-dev"]);
        assert!(choose(&["libclang-16-dev"]).is_err());
    }
}
