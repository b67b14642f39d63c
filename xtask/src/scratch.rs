//! A folder for the files of one run.

use crate::interrupt::{AtInterrupt, at_interrupt};
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// A folder that is removed on drop, when this process is told to end, and else by the next run.
pub(crate) struct Scratch {
    path: PathBuf,
    _at_interrupt: AtInterrupt,
}

impl Scratch {
    /// Makes this process's folder in `parent`. There is one at a time in a parent.
    pub(crate) fn new(parent: &Path) -> Result<Scratch> {
        fs::create_dir_all(parent)
            .with_context(|| format!("cannot create {}", parent.display()))?;
        let parent = parent.canonicalize()?;
        remove_leftovers(&parent);
        let path = parent.join(std::process::id().to_string());
        fs::create_dir_all(&path)?;
        let folder = path.clone();
        let _at_interrupt = at_interrupt(move || drop(fs::remove_dir_all(folder)))?;
        Ok(Scratch {
            path,
            _at_interrupt,
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

/// Removes the folders of runs whose process was killed before it could.
fn remove_leftovers(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        if !Path::new("/proc").join(entry.file_name()).exists() {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_goes_with_its_owner_and_leftovers_of_the_dead_go_too() {
        let parent = std::env::temp_dir().join(format!("scratch-test-{}", std::process::id()));
        let dead = parent.join("0");
        fs::create_dir_all(&dead).unwrap();

        let scratch = Scratch::new(&parent).unwrap();
        assert!(scratch.own_program().unwrap().exists());
        assert!(!dead.exists());

        let path = scratch.path().to_owned();
        drop(scratch);
        assert!(!path.exists());
        fs::remove_dir_all(parent).unwrap();
    }
}
