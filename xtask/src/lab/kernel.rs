//! The guest's kernel: found in what apt offers today, taken out of its package, kept in the cache.
//!
//! Nothing is installed. No version is written down: the packages' names change with every update.

use super::{image, module};
use crate::setup::{self, Consent, Purpose};
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Where the lab's kernel comes from.
#[derive(Debug, Clone)]
pub(crate) enum Source {
    /// The newest of a series ("6.1") that apt offers; without a series, the one the lab is tested with
    /// if it is offered, else the distribution's own.
    Archive(Option<String>),
    /// An image and a folder of modules on this machine.
    Files {
        /// A bzImage.
        image: PathBuf,
        /// A folder with the image's modules somewhere under it.
        modules: PathBuf,
    },
}

/// A kernel that is ready to boot.
#[derive(Debug, Clone)]
pub(crate) struct Kernel {
    /// The image to give to QEMU.
    pub(crate) image: PathBuf,
    /// The module files, in the order to load them.
    pub(crate) modules: Vec<PathBuf>,
}

/// The series taken when none is asked for.
const USUAL_SERIES: &str = "6.1";

/// After this time the archive is asked again whether there is a newer one.
const FRESH: Duration = Duration::from_secs(24 * 3600);

impl Kernel {
    /// Finds the kernel, downloading it into `cache` if it is not there. `scratch` is a folder for this run alone.
    pub(crate) fn prepare(
        source: &Source,
        cache: &Path,
        scratch: &Path,
        consent: Consent,
    ) -> Result<Kernel> {
        match source {
            Source::Archive(series) => {
                let series = series.as_deref();
                Kernel::load(&from_archive(series, cache, scratch, consent)?)
            }
            Source::Files { image, modules } => {
                // Made anew each time: the files may have changed since.
                let folder = scratch.join("kernel");
                unpack(image, modules, scratch, &folder, consent)?;
                Kernel::load(&folder)
            }
        }
    }

    fn load(folder: &Path) -> Result<Kernel> {
        let mut modules = fs::read_dir(folder.join("modules"))?
            .map(|entry| Ok(entry?.path()))
            .collect::<Result<Vec<_>>>()?;
        modules.sort();
        Ok(Kernel {
            image: folder.join("image"),
            modules,
        })
    }
}

/// The folder in the cache that holds the newest kernel of the series.
fn from_archive(
    series: Option<&str>,
    cache: &Path,
    scratch: &Path,
    consent: Consent,
) -> Result<PathBuf> {
    let note = cache.join(format!("newest-{}", series.unwrap_or("usual")));
    if let Some(folder) = noted(&note, cache) {
        return Ok(folder);
    }
    // Lists that are missing or old show in a kernel that is not offered or cannot be fetched.
    let package = fetch(series, cache, scratch).or_else(|first| {
        eprintln!("lab: {first:#}");
        setup::update_lists().map_err(|_| first)?;
        fetch(series, cache, scratch)
    })?;
    let folder = cache.join(&package);
    if !folder.join("image").exists() {
        keep(&scratch.join("tree"), scratch, &folder, consent)?;
    }
    fs::write(&note, &package)?;
    Ok(folder)
}

/// Finds the newest kernel of the series, downloads it if it is not in the cache, and returns its package's name.
fn fetch(series: Option<&str>, cache: &Path, scratch: &Path) -> Result<String> {
    let package = choose(&offers()?, series, Package::is_downloadable)?;
    if !cache.join(&package.image).join("image").exists() {
        eprintln!(
            "lab: downloading {} into {}",
            package.image,
            cache.display()
        );
        download(&package, scratch)?;
    }
    Ok(package.image)
}

/// What the archive answered less than a day ago, if that kernel is still in the cache.
fn noted(note: &Path, cache: &Path) -> Option<PathBuf> {
    let age = fs::metadata(note).ok()?.modified().ok()?.elapsed().ok()?;
    let folder = cache.join(fs::read_to_string(note).ok()?);
    (age < FRESH && folder.join("image").exists()).then_some(folder)
}

/// A kernel that apt offers.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Package {
    /// The package with the image.
    image: String,
    /// Packages with its modules, where they are apart (Ubuntu).
    modules: Vec<String>,
}

impl Package {
    fn names(&self) -> Vec<&str> {
        let names = std::iter::once(&self.image).chain(&self.modules);
        names.map(String::as_str).collect()
    }

    fn is_downloadable(&self) -> bool {
        setup::is_downloadable(&self.names())
    }
}

/// The names of all kernel packages that apt knows, those that are only installed among them.
fn offers() -> Result<Vec<String>> {
    let output = Command::new("apt-cache")
        .args(["pkgnames", "linux-"])
        .output()
        .context("cannot run apt-cache: give the lab a kernel with --kernel-image and --modules")?;
    ensure!(output.status.success(), "apt-cache pkgnames failed");
    Ok(String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(str::to_owned)
        .collect())
}

/// Takes the newest kernel of the series that can be had.
fn choose(
    offers: &[String],
    series: Option<&str>,
    can_be_had: impl Fn(&Package) -> bool,
) -> Result<Package> {
    let newest = |series: &str| {
        let images = offers.iter().filter_map(|name| Image::parse(name));
        let mut images: Vec<Image<'_>> = images.filter(|image| image.is_of(series)).collect();
        images.sort_by_key(|image| std::cmp::Reverse(image.rank()));
        images
            .into_iter()
            .map(|image| Package {
                image: image.package.to_owned(),
                modules: image.module_packages(offers),
            })
            .find(&can_be_had)
    };
    let package = match series {
        Some(series) => newest(series),
        None => newest(USUAL_SERIES).or_else(|| newest("")),
    };
    package.with_context(|| {
        let what = series.map_or_else(|| "no kernel".to_owned(), |s| format!("no kernel {s}"));
        format!(
            "apt offers {what} (asked with `apt-cache pkgnames linux-image`); choose another with \
             --kernel, or give one with --kernel-image and --modules"
        )
    })
}

/// A package name such as `linux-image-6.1.0-57-amd64`, taken apart.
struct Image<'a> {
    package: &'a str,
    /// `6.1.0-57-amd64`
    release: &'a str,
    signed: bool,
}

impl<'a> Image<'a> {
    /// `None` for what is not a plain kernel of this architecture.
    fn parse(package: &'a str) -> Option<Image<'a>> {
        let name = package.strip_prefix("linux-image-")?;
        // Debian puts the word behind, Ubuntu before.
        let (name, unsigned_before) = match name.strip_prefix("unsigned-") {
            Some(name) => (name, true),
            None => (name, false),
        };
        let (release, unsigned_behind) = match name.strip_suffix("-unsigned") {
            Some(release) => (release, true),
            None => (name, false),
        };
        let numbered = release.starts_with(|c: char| c.is_ascii_digit());
        let plain = release.ends_with("-amd64") || release.ends_with("-generic");
        let special = ["-rt-", "-cloud-"]
            .iter()
            .any(|word| release.contains(word));
        let signed = !(unsigned_before || unsigned_behind);
        (numbered && plain && !special).then_some(Image {
            package,
            release,
            signed,
        })
    }

    /// "6.1" is the series of 6.1.0-57 but not of 6.12.
    fn is_of(&self, series: &str) -> bool {
        match self.release.strip_prefix(series) {
            Some(rest) => series.is_empty() || rest.starts_with(['.', '-', '+']),
            None => false,
        }
    }

    /// Newer first by the numbers in the name; of two with the same, the signed one.
    fn rank(&self) -> (Vec<u64>, bool) {
        let numbers = self.release.split(|c: char| !c.is_ascii_digit());
        (
            numbers.filter_map(|number| number.parse().ok()).collect(),
            self.signed,
        )
    }

    fn module_packages(&self, offers: &[String]) -> Vec<String> {
        let names =
            ["linux-modules-", "linux-modules-extra-"].map(|p| format!("{p}{}", self.release));
        names
            .into_iter()
            .filter(|name| offers.contains(name))
            .collect()
    }
}

/// Downloads the package and lays its files out in the folder `tree`.
fn download(package: &Package, scratch: &Path) -> Result<()> {
    let tree = scratch.join("tree");
    fs::create_dir_all(&tree)?;
    run(Command::new("apt-get")
        .args(["-q", "download"])
        .args(package.names())
        .current_dir(scratch))?;
    for entry in fs::read_dir(scratch)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            run(Command::new("dpkg-deb").arg("-x").arg(&path).arg(&tree))?;
        }
    }
    Ok(())
}

/// Keeps what the lab needs of a downloaded package as `folder`.
fn keep(tree: &Path, scratch: &Path, folder: &Path, consent: Consent) -> Result<()> {
    let image = only_image(&tree.join("boot"))?;
    // Debian 13 and Ubuntu may have /usr/lib/modules instead.
    let modules = ["lib/modules", "usr/lib/modules"].map(|path| tree.join(path));
    let Some(modules) = modules.iter().find(|path| path.exists()) else {
        bail!("no modules in the package");
    };
    unpack(&image, modules, scratch, folder, consent)?;
    // Four hundred megabytes that the running guest has no use for.
    Ok(fs::remove_dir_all(tree)?)
}

fn only_image(boot: &Path) -> Result<PathBuf> {
    for entry in fs::read_dir(boot)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with("vmlinuz") {
            return Ok(entry.path());
        }
    }
    bail!("no kernel image in the package")
}

/// Makes the folder that [`Kernel::load`] reads. It appears whole or not at all, so that labs started at
/// the same time do not see each other's half.
fn unpack(
    image: &Path,
    modules: &Path,
    scratch: &Path,
    folder: &Path,
    consent: Consent,
) -> Result<()> {
    if module::need_zstd(modules)? {
        setup::ensure_installed(&[Purpose::Zstd], consent)?;
    }
    let part = scratch.join("unpacked");
    module::collect(modules, &part.join("modules"))?;
    let packed = fs::read(image).with_context(|| format!("cannot read {}", image.display()))?;
    let kernel = image::unpacked(&packed)?.unwrap_or(packed);
    fs::write(part.join("image"), kernel)?;
    match fs::rename(&part, folder) {
        // Another lab was faster; its folder is as good.
        Err(_) if folder.join("image").exists() => Ok(fs::remove_dir_all(&part)?),
        result => Ok(result?),
    }
}

fn run(command: &mut Command) -> Result<()> {
    let output = command
        .output()
        .with_context(|| format!("cannot run {command:?}"))?;
    if !output.status.success() {
        bail!(
            "{command:?}: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(offers: &[&str], series: Option<&str>) -> Result<Package> {
        let offers: Vec<String> = offers.iter().map(|name| (*name).to_owned()).collect();
        choose(&offers, series, |package| !package.image.contains("local"))
    }

    const BOOKWORM: &[&str] = &[
        "linux-image-amd64",
        "linux-image-6.1.0-9-amd64",
        "linux-image-6.1.0-57-amd64",
        "linux-image-6.1.0-57-amd64-unsigned",
        "linux-image-6.1.0-57-amd64-dbg",
        "linux-image-6.1.0-58-cloud-amd64",
        "linux-image-6.1.0-58-rt-amd64",
        "linux-image-6.12.9+deb12-amd64-unsigned",
        "linux-image-6.12.117+deb12-amd64-unsigned",
        "linux-headers-6.1.0-99-amd64",
    ];

    #[test]
    fn the_newest_of_a_series_is_taken_by_number_not_by_letter() {
        let package = chosen(BOOKWORM, Some("6.1")).unwrap();
        assert_eq!(package.image, "linux-image-6.1.0-57-amd64");
        let package = chosen(BOOKWORM, Some("6.12")).unwrap();
        assert_eq!(package.image, "linux-image-6.12.117+deb12-amd64-unsigned");
    }

    #[test]
    fn without_a_series_the_usual_one_is_taken_or_else_the_newest() {
        assert_eq!(
            chosen(BOOKWORM, None).unwrap().image,
            "linux-image-6.1.0-57-amd64"
        );
        let trixie = [
            "linux-image-6.12.3+deb13-amd64",
            "linux-image-6.16.3+deb13-amd64",
        ];
        assert_eq!(
            chosen(&trixie, None).unwrap().image,
            "linux-image-6.16.3+deb13-amd64"
        );
    }

    #[test]
    fn a_kernel_that_was_built_here_and_cannot_be_downloaded_is_passed_over() {
        let built = "linux-image-6.1.99-local-amd64";
        let package = chosen(&[BOOKWORM, &[built]].concat(), Some("6.1")).unwrap();
        assert_eq!(package.image, "linux-image-6.1.0-57-amd64");
        assert!(chosen(&[built], None).is_err());
    }

    #[test]
    fn ubuntu_has_its_modules_in_packages_of_their_own() {
        let noble = [
            "linux-image-6.8.0-31-generic",
            "linux-image-unsigned-6.8.0-31-generic",
            "linux-modules-6.8.0-31-generic",
            "linux-modules-extra-6.8.0-31-generic",
            "linux-modules-extra-6.8.0-30-generic",
        ];
        let package = chosen(&noble, None).unwrap();
        assert_eq!(package.image, "linux-image-6.8.0-31-generic");
        assert_eq!(
            package.modules,
            [
                "linux-modules-6.8.0-31-generic",
                "linux-modules-extra-6.8.0-31-generic"
            ]
        );
    }

    #[test]
    fn a_series_that_is_not_offered_is_named_in_the_error() {
        let error = chosen(BOOKWORM, Some("5.10")).unwrap_err().to_string();
        assert!(error.contains("no kernel 5.10"), "{error}");
    }
}
