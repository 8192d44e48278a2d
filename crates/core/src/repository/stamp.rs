//! What a model on disk looks like at one moment, so that a change can be told from a look.
//!
//! A file counts as changed when its length or its content does. Files up to [`MAX_HASHED_BYTES`] are compared by a hash
//! of their bytes, which touching, copying over or changing permissions leaves alone; larger ones by their time of
//! modification and their inode. A file that looks untouched since the last look is not read again.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::{JUNK, ModelSource, Place, version_number, visible_name};

/// Larger files are not read to find out whether they changed.
const MAX_HASHED_BYTES: u64 = 4 << 20;
/// Folders within folders that are looked at; links in a circle end here.
const MAX_DEPTH: usize = 8;
/// Folders beside the versions whose files are part of a model.
const SIDE_FOLDERS: [&str; 3] = ["configs", "warmup", "initial_state"];

/// One file.
#[derive(Clone, Debug)]
struct Mark {
    bytes: u64,
    /// Modification in nanoseconds since the epoch, and inode.
    seen: (i128, u64),
    /// Last change of any kind, which nobody can set back; nanoseconds since the epoch.
    changed: i128,
    hash: Option<blake3::Hash>,
}

impl PartialEq for Mark {
    fn eq(&self, other: &Self) -> bool {
        self.bytes == other.bytes
            && match (&self.hash, &other.hash) {
                (Some(mine), Some(theirs)) => mine == theirs,
                _ => self.seen == other.seen,
            }
    }
}

/// Files by path relative to the model.
type Marks = BTreeMap<String, Mark>;

/// See the module.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Stamp {
    /// Where the model lies.
    place: Option<Place>,
    /// Configuration, labels and other files that all versions share.
    side: Marks,
    versions: BTreeMap<i64, Marks>,
}

impl Stamp {
    /// Looks at a model. What is unchanged since `before` is not read again.
    pub(crate) fn of(source: &ModelSource, before: Option<&Self>) -> Self {
        let mut stamp = Self { place: Some(source.place.clone()), ..Self::default() };
        let empty = Marks::new();
        let old_side = before.map_or(&empty, |before| &before.side);
        let dir = match &source.place {
            Place::Directory(dir) => dir,
            Place::File(path) => {
                mark(path, "model", old_side, &mut stamp.side, 0);
                return stamp;
            }
            Place::Ambiguous(_) => return stamp,
        };
        let Ok(entries) = fs_err::read_dir(dir) else { return stamp };
        for entry in entries.filter_map(Result::ok) {
            let Some(name) = visible_name(&entry.file_name()) else { continue };
            let Ok(metadata) = fs_err::metadata(entry.path()) else { continue };
            if !metadata.is_dir() || SIDE_FOLDERS.contains(&name.as_str()) {
                mark(&entry.path(), &name, old_side, &mut stamp.side, 0);
            } else if let Ok(version) = version_number(&name) {
                let old = before.and_then(|before| before.versions.get(&version)).unwrap_or(&empty);
                let files = stamp.versions.entry(version).or_default();
                mark(&entry.path(), "", old, files, 0);
            }
        }
        stamp
    }

    /// Whether everything that all versions share is the same.
    pub(crate) fn shares(&self, other: &Self) -> bool {
        self.place == other.place && self.side == other.side
    }

    /// Whether a version has the same files in both.
    pub(crate) fn has_same_version(&self, other: &Self, version: i64) -> bool {
        self.versions.get(&version).is_some_and(|files| other.versions.get(&version) == Some(files))
    }

    /// Versions that are there, ascending.
    pub(crate) fn versions(&self) -> impl Iterator<Item = i64> {
        self.versions.keys().copied()
    }
}

fn mark(path: &Path, name: &str, before: &Marks, marks: &mut Marks, depth: usize) {
    let Ok(metadata) = fs_err::metadata(path) else { return };
    if metadata.is_dir() {
        if depth >= MAX_DEPTH {
            return;
        }
        let Ok(entries) = fs_err::read_dir(path) else { return };
        for entry in entries.filter_map(Result::ok) {
            let Some(inner) = visible_name(&entry.file_name()) else { continue };
            if !JUNK.contains(&inner.as_str()) {
                mark(&entry.path(), &format!("{name}/{inner}"), before, marks, depth + 1);
            }
        }
        return;
    }
    if !metadata.is_file() {
        return;
    }
    let modified = i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec());
    let changed = i128::from(metadata.ctime()) * 1_000_000_000 + i128::from(metadata.ctime_nsec());
    let (bytes, seen) = (metadata.len(), (modified, metadata.ino()));
    let is_same = |old: &&Mark| (old.bytes, old.seen, old.changed) == (bytes, seen, changed);
    let known = before.get(name).filter(is_same);
    let hash = match known {
        Some(old) => old.hash,
        None if bytes <= MAX_HASHED_BYTES => fs_err::read(path).ok().map(|content| blake3::hash(&content)),
        None => None,
    };
    marks.insert(name.to_owned(), Mark { bytes, seen, changed, hash });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(path: &Path, content: &str) {
        fs_err::create_dir_all(path.parent().expect("has a parent")).expect("can create");
        fs_err::write(path, content).expect("can write");
    }

    #[test]
    fn content_counts_and_times_do_not() {
        let root = tempfile::tempdir().expect("a directory");
        let dir = root.path().join("m");
        let source = ModelSource { name: "m".into(), place: Place::Directory(dir.clone()) };
        for (file, content) in [("config.pbtxt", "a"), ("1/model.onnx", "b"), ("2/deep/weights", "c")] {
            put(&dir.join(file), content);
        }
        let first = Stamp::of(&source, None);
        assert_eq!(first.versions().collect::<Vec<_>>(), [1, 2]);
        let file = fs_err::File::options().write(true).open(dir.join("1/model.onnx")).expect("is there");
        file.file().set_modified(std::time::SystemTime::UNIX_EPOCH).expect("can set");
        put(&dir.join("model/x"), "no version");
        put(&dir.join("1/.hidden"), "hidden");
        assert_eq!(Stamp::of(&source, Some(&first)), first);

        put(&dir.join("2/deep/weights"), "C");
        let second = Stamp::of(&source, Some(&first));
        assert!(second.shares(&first) && second.has_same_version(&first, 1));
        assert!(!second.has_same_version(&first, 2) && !second.has_same_version(&first, 3));

        put(&dir.join("labels.txt"), "cat");
        assert!(!Stamp::of(&source, Some(&second)).shares(&second));
    }

    #[test]
    fn links_in_a_circle_end() {
        let root = tempfile::tempdir().expect("a directory");
        put(&root.path().join("1/model.onnx"), "b");
        std::os::unix::fs::symlink(".", root.path().join("1/again")).expect("can link");
        let source = ModelSource { name: "m".into(), place: Place::Directory(root.path().to_owned()) };
        assert_eq!(Stamp::of(&source, None), Stamp::of(&source, None));
    }
}
