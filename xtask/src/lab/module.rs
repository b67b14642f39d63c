//! Which module files the guest needs, and in which order.
//!
//! The kernel's packages come without the index that `modprobe` reads (it is made on installation), so
//! the dependencies are read from the modules themselves: each carries a list of `key=value` strings.

use anyhow::{Context, Result, bail};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The modules that the lab asks for. Those built into the kernel need no file.
const WANTED: &[&str] = &[
    "virtio_pci",
    "virtio_console",
    "9pnet_virtio",
    "9p",
    "overlay",
    "crc32_generic", // rxe asks the crypto API for "crc32" by name on 6.1, and fails to add a link without it
    "ib_uverbs",
    "rdma_ucm",
    "rdma_rxe",
    "veth",
    "sch_netem",
];

/// Copies what is needed out of `folder` into `target`, uncompressed, named so that the names' order is
/// the order to load them in.
pub(crate) fn collect(folder: &Path, target: &Path) -> Result<()> {
    let tree = Tree::of(folder)?;
    let images: HashMap<String, Vec<u8>> = tree.closure(WANTED)?;
    let order = load_order(WANTED, |name| images.get(name).map(|image| depends(image)));
    fs::create_dir_all(target)?;
    for (index, name) in order.iter().enumerate() {
        fs::write(target.join(format!("{index:03}-{name}.ko")), &images[name])?;
    }
    Ok(())
}

/// Whether zstd is needed to read the modules in `folder`. Which packer is used depends on the distribution's release.
pub(crate) fn need_zstd(folder: &Path) -> Result<bool> {
    let files = Tree::of(folder)?.files;
    Ok(files
        .values()
        .any(|path| path.extension().is_some_and(|extension| extension == "zst")))
}

/// The module files under a folder, by name.
struct Tree {
    files: HashMap<String, PathBuf>,
    builtin: Vec<String>,
}

impl Tree {
    fn of(folder: &Path) -> Result<Tree> {
        let mut files = HashMap::new();
        let mut folders = vec![folder.to_path_buf()];
        let mut builtin = Vec::new();
        while let Some(folder) = folders.pop() {
            let entries = fs::read_dir(&folder)
                .with_context(|| format!("cannot read the module folder {}", folder.display()))?;
            for entry in entries {
                let path = entry?.path();
                // `build` and `source` are links to header packages: nothing to find there.
                if path.is_dir() && !path.is_symlink() {
                    folders.push(path);
                } else if path.ends_with("modules.builtin") {
                    let list = fs::read_to_string(&path)?;
                    builtin.extend(list.lines().filter_map(|line| name_of(Path::new(line))));
                } else if let Some(name) = name_of(&path) {
                    files.insert(name, path);
                }
            }
        }
        Ok(Tree { files, builtin })
    }

    /// Reads the wanted modules and all they depend on.
    fn closure(&self, wanted: &[&str]) -> Result<HashMap<String, Vec<u8>>> {
        let mut images = HashMap::new();
        let mut names: Vec<String> = wanted.iter().map(|name| (*name).to_owned()).collect();
        while let Some(name) = names.pop() {
            if images.contains_key(&name) || self.builtin.contains(&name) {
                continue;
            }
            let Some(path) = self.files.get(&name) else {
                if OPTIONAL.contains(&&*name) {
                    continue;
                }
                bail!("the kernel has no module {name}, neither built in nor as a file");
            };
            let image = read(path)?;
            names.extend(depends(&image));
            images.insert(name, image);
        }
        Ok(images)
    }
}

/// Newer kernels have no such module and no need of it.
const OPTIONAL: &[&str] = &["crc32_generic"];

/// `a/b/rdma-rxe.ko.xz` is the module `rdma_rxe`.
fn name_of(path: &Path) -> Option<String> {
    let file = path.file_name()?.to_str()?;
    let (stem, compression) = file.split_once(".ko")?;
    matches!(compression, "" | ".xz" | ".zst" | ".gz").then(|| stem.replace('-', "_"))
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let tool = match path.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return fs::read(path).with_context(|| format!("cannot read {}", path.display())),
    };
    let output = Command::new(tool)
        .arg("-dc")
        .arg(path)
        .output()
        .with_context(|| format!("cannot run {tool}"))?;
    if !output.status.success() {
        bail!(
            "{tool} -dc {}: {}",
            path.display(),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(output.stdout)
}

/// What a module says it needs.
fn depends(image: &[u8]) -> Vec<String> {
    let mut names = Vec::new();
    for string in image.split(|&byte| byte == 0) {
        if let Some(list) = string.strip_prefix(b"depends=") {
            names.extend(
                String::from_utf8_lossy(list)
                    .split(',')
                    .map(|name| name.replace('-', "_")),
            );
        }
    }
    names.retain(|name| !name.is_empty());
    names
}

/// Dependencies first. `depends_of` gives `None` for what needs no loading.
fn load_order(wanted: &[&str], depends_of: impl Fn(&str) -> Option<Vec<String>>) -> Vec<String> {
    fn visit(
        name: &str,
        depends_of: &impl Fn(&str) -> Option<Vec<String>>,
        order: &mut Vec<String>,
    ) {
        if order.iter().any(|known| known == name) {
            return;
        }
        let Some(depends) = depends_of(name) else {
            return;
        };
        for depend in depends {
            visit(&depend, depends_of, order);
        }
        order.push(name.to_owned());
    }
    let mut order = Vec::new();
    for name in wanted {
        visit(name, &depends_of, &mut order);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_are_read_from_the_module_itself() {
        let image = b"\x7fELF\0license=GPL\0depends=ib_core,udp-tunnel\0name=rdma_rxe\0";
        assert_eq!(depends(image), ["ib_core", "udp_tunnel"]);
        assert!(depends(b"\x7fELF\0depends=\0").is_empty());
    }

    #[test]
    fn dependencies_are_loaded_first_and_once() {
        let order = load_order(&["a", "b"], |name| {
            Some(match name {
                "a" => vec!["c".to_owned()],
                "b" => vec!["a".to_owned(), "c".to_owned(), "built-in".to_owned()],
                "c" => vec![],
                _ => return None,
            })
        });
        assert_eq!(order, ["c", "a", "b"]);
    }

    #[test]
    fn zstd_is_needed_for_modules_that_it_has_packed() {
        let folder = std::env::temp_dir().join(format!("module-test-{}", std::process::id()));
        fs::create_dir_all(folder.join("kernel")).unwrap();
        fs::write(folder.join("kernel/veth.ko.xz"), "").unwrap();
        fs::write(folder.join("modules.zst"), "").unwrap();
        assert!(!need_zstd(&folder).unwrap());
        fs::write(folder.join("kernel/9p.ko.zst"), "").unwrap();
        assert!(need_zstd(&folder).unwrap());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_module_is_named_without_folder_dash_and_compression() {
        assert_eq!(
            name_of(Path::new("kernel/rdma-rxe.ko.xz")).as_deref(),
            Some("rdma_rxe")
        );
        assert_eq!(name_of(Path::new("kernel/9p.ko")).as_deref(), Some("9p"));
        assert_eq!(name_of(Path::new("modules.dep")), None);
        assert_eq!(name_of(Path::new("x.korea")), None);
    }
}
