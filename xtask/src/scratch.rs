//! A folder for the files of one run.

use crate::interrupt::{AtInterrupt, at_interrupt};
use crate::lock::Lock;
use anyhow::{Context, Result};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A folder that is removed on drop, when this process is told to end, and else by the next run.
pub(crate) struct Scratch {
    path: PathBuf,
    _at_interrupt: AtInterrupt,
    /// Says to others that the folder is in use. Process numbers do not: several containers may share the parent.
    _in_use: Option<Lock>,
}

/// The file that is locked: in a folder while its run lives, in the parent while one is made.
const LOCK: &str = "lock";

impl Scratch {
    /// Makes a folder in `parent` for this run alone.
    pub(crate) fn new(parent: &Path) -> Result<Scratch> {
        fs::create_dir_all(parent)
            .with_context(|| format!("cannot create {}", parent.display()))?;
        let parent = parent.canonicalize()?;
        // One at a time, so that nobody sees a folder that is not locked yet. Without locks, as some network file
        // systems are, nobody can tell what is left over, and it stays.
        let turn = Lock::wait_on(&parent.join(LOCK));
        if turn.is_ok() {
            remove_leftovers(&parent);
        }
        let path = make_folder(&parent)
            .with_context(|| format!("cannot create a folder in {}", parent.display()))?;
        let _in_use = Lock::try_on(&path.join(LOCK)).unwrap_or_default();
        drop(turn);
        let folder = path.clone();
        let _at_interrupt = at_interrupt(move || drop(fs::remove_dir_all(folder)))?;
        Ok(Scratch {
            path,
            _at_interrupt,
            _in_use,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// This program under a name of its own, so that a build at the same time does not change it under a
    /// running guest.
    pub(crate) fn own_program(&self) -> Result<PathBuf> {
        let copy = self.path.join("xtask");
        let linked = std::env::current_exe().and_then(|program| fs::hard_link(program, &copy));
        if linked.is_err() && !copy.exists() {
            // Another file system, or the program has been replaced since it was started.
            fs::copy("/proc/self/exe", &copy).context("cannot copy this program")?;
        }
        Ok(copy)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// A folder that nobody had, named after this process. In another container another may have its number.
fn make_folder(parent: &Path) -> io::Result<PathBuf> {
    let process = std::process::id();
    let mut number = 0;
    loop {
        let path = match number {
            0 => parent.join(process.to_string()),
            _ => parent.join(format!("{process}-{number}")),
        };
        match fs::create_dir(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
            result => return result.map(|()| path),
        }
    }
}

/// Removes the folders of runs whose process was killed before it could.
fn remove_leftovers(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        if entry.path().is_dir() && is_left_over(&entry.path()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn is_left_over(folder: &Path) -> bool {
    let lock = folder.join(LOCK);
    if lock.exists() {
        return matches!(Lock::try_on(&lock), Ok(Some(_)));
    }
    // Of a run that was killed in the instant before it had the lock.
    let process = folder.file_name().unwrap_or_default();
    !Path::new("/proc").join(process).exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parent(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("scratch-test-{name}-{}", std::process::id()))
    }

    #[test]
    fn the_folder_goes_with_its_owner_and_leftovers_of_the_dead_go_too() {
        let parent = parent("dead");
        let (dead, unlocked) = (parent.join("0"), parent.join("1-0"));
        fs::create_dir_all(&dead).unwrap();
        fs::create_dir_all(&unlocked).unwrap();
        fs::write(unlocked.join(LOCK), "").unwrap();

        let scratch = Scratch::new(&parent).unwrap();
        assert!(scratch.own_program().unwrap().exists());
        assert!(!dead.exists() && !unlocked.exists());

        let path = scratch.path().to_owned();
        drop(scratch);
        assert!(!path.exists());
        fs::remove_dir_all(parent).unwrap();
    }

    #[test]
    fn the_folder_of_a_live_run_stays_though_its_process_cannot_be_seen_here() {
        let parent = parent("alive");
        let elsewhere = parent.join("0");
        fs::create_dir_all(&elsewhere).unwrap();
        let lock = Lock::try_on(&elsewhere.join(LOCK)).unwrap();
        assert!(lock.is_some());

        drop(Scratch::new(&parent).unwrap());
        assert!(elsewhere.exists());
        drop(lock);
        drop(Scratch::new(&parent).unwrap());
        assert!(!elsewhere.exists());
        fs::remove_dir_all(parent).unwrap();
    }

    #[test]
    fn two_runs_with_one_process_number_have_a_folder_each() {
        let parent = parent("twins");
        let one = Scratch::new(&parent).unwrap();
        let two = Scratch::new(&parent).unwrap();
        assert_ne!(one.path(), two.path());
        assert!(one.path().exists() && two.path().exists());
        drop((one, two));
        fs::remove_dir_all(parent).unwrap();
    }
}
