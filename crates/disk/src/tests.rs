//! A disk of many layers against a plain array of bytes.

use proptest::prelude::*;

use super::*;

const BLOCKS: u64 = 24;
const BYTES: u64 = BLOCKS * BLOCK;

fn delta() -> File {
    let file = tempfile::tempfile().unwrap();
    create_delta(&file, BYTES).unwrap();
    file
}

fn image() -> File {
    let file = tempfile::tempfile().unwrap();
    let bytes: Vec<u8> = (0..BYTES).map(|at| (at / 512) as u8 | 1).collect();
    file.write_all_at(&bytes, 0).unwrap();
    file
}

fn read(disk: &Disk, offset: u64, len: u64) -> Vec<u8> {
    let mut out = Vec::new();
    for extent in disk.extents(offset, len).unwrap() {
        let mut bytes = vec![0u8; extent.len as usize];
        if let Source::File { file, offset } = extent.source {
            read_or_zeros(file, &mut bytes, offset).unwrap();
        }
        out.extend(bytes);
    }
    out
}

fn write(disk: &mut Disk, offset: u64, bytes: &[u8]) -> Result<(), DiskError> {
    disk.write_at(offset, bytes.len() as u64, |file, at| file.write_all_at(bytes, at))
}

#[derive(Debug, Clone)]
enum Step {
    Write(u64, u64, u8),
    Zero(u64, u64),
    Fail(u64, u64),
    Freeze,
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    let range = (0..BYTES, 0..3 * BLOCK).prop_map(|(offset, len)| (offset, len.min(BYTES - offset)));
    prop_oneof![
        4 => (range.clone(), any::<u8>()).prop_map(|((offset, len), byte)| Step::Write(offset, len, byte)),
        2 => range.clone().prop_map(|(offset, len)| Step::Zero(offset, len)),
        1 => range.prop_map(|(offset, len)| Step::Fail(offset, len)),
        1 => Just(Step::Freeze),
        1 => Just(Step::Reopen),
    ]
}

proptest! {
    #[test]
    fn reads_what_was_written_last(steps in prop::collection::vec(step(), 0..60)) {
        let base = image();
        let mut model = vec![0u8; BYTES as usize];
        base.read_exact_at(&mut model, 0).unwrap();
        let mut files = vec![delta()];
        let open = |files: &[File]| {
            let mut copies: Vec<File> = files.iter().map(|file| file.try_clone().unwrap()).collect();
            let top = copies.pop();
            Disk::open(Base::ReadOnly(base.try_clone().unwrap()), copies, top).unwrap()
        };
        let mut disk = open(&files);
        for step in steps {
            match step {
                Step::Write(offset, len, byte) => {
                    let bytes = vec![byte; len as usize];
                    write(&mut disk, offset, &bytes).unwrap();
                    model[offset as usize..(offset + len) as usize].copy_from_slice(&bytes);
                }
                Step::Zero(offset, len) => {
                    disk.zero(offset, len).unwrap();
                    model[offset as usize..(offset + len) as usize].fill(0);
                }
                // A writer that gets nothing written changes nothing.
                Step::Fail(offset, len) => {
                    let failed = disk.write_at(offset, len, |_, _| Err(io::Error::from_raw_os_error(28)));
                    let is_full = matches!(
                        failed, Err(DiskError::Io { source, .. }) if source.kind() == io::ErrorKind::StorageFull
                    );
                    prop_assert!(len == 0 || is_full);
                }
                Step::Freeze => {
                    files.push(delta());
                    disk.freeze(files.last().unwrap().try_clone().unwrap()).unwrap();
                }
                Step::Reopen => disk = open(&files),
            }
            prop_assert!(read(&disk, 0, BYTES) == model);
        }
        drop(disk);
        prop_assert!(read(&open(&files), 0, BYTES) == model);
    }

    #[test]
    fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..64), at in 0usize..28, keep: bool) {
        let file = delta();
        if keep {
            file.write_all_at(&bytes, at as u64).unwrap();
        } else {
            file.set_len(0).unwrap();
            file.write_all_at(&bytes, 0).unwrap();
        }
        let _ = Disk::open(Base::ReadOnly(image()), vec![file], None);
    }
}

#[test]
fn copies_of_a_frozen_disk_are_apart() {
    let frozen = delta();
    let open =
        |top| Disk::open(Base::ReadOnly(image()), vec![frozen.try_clone().unwrap()], Some(top)).unwrap();
    let mut parent =
        Disk::open(Base::ReadOnly(image()), Vec::new(), Some(frozen.try_clone().unwrap())).unwrap();
    write(&mut parent, 0, &[9; 512]).unwrap();
    parent.freeze(delta()).unwrap();
    let mut child = open(delta());
    child.replace_top(delta()).unwrap();
    write(&mut parent, 0, &[1; 512]).unwrap();
    write(&mut child, 512, &[2; 512]).unwrap();
    assert_eq!(read(&parent, 0, 1024)[..512], [1; 512]);
    assert_eq!(read(&child, 0, 1024)[..512], [9; 512]);
    assert_eq!(read(&child, 0, 1024)[512..], [2; 512]);
    assert_ne!(read(&parent, 512, 512), [2; 512]);
}

#[test]
fn what_is_not_on_the_disk_is_refused() {
    let mut disk = Disk::open(Base::ReadOnly(image()), Vec::new(), Some(delta())).unwrap();
    for (offset, len) in [(BYTES, 1), (0, BYTES + 1), (u64::MAX, 2), (u64::MAX - 5, u64::MAX)] {
        assert!(matches!(disk.extents(offset, len), Err(DiskError::Beyond { .. })));
        assert!(matches!(disk.write_at(offset, len, |_, _| Ok(())), Err(DiskError::Beyond { .. })));
        assert!(matches!(disk.zero(offset, len), Err(DiskError::Beyond { .. })));
    }
    let mut read_only = Disk::open(Base::ReadOnly(image()), Vec::new(), None).unwrap();
    assert!(matches!(write(&mut read_only, 0, &[0; 512]), Err(DiskError::ReadOnly)));
    assert!(matches!(read_only.zero(0, 512), Err(DiskError::ReadOnly)));
    let other = tempfile::tempfile().unwrap();
    create_delta(&other, BYTES * 2).unwrap();
    assert!(matches!(disk.freeze(other), Err(DiskError::Size { .. })));
}

#[test]
fn a_zeroed_block_takes_no_space() {
    use std::os::unix::fs::MetadataExt;
    let file = delta();
    let mut disk = Disk::open(Base::ReadOnly(image()), Vec::new(), Some(file.try_clone().unwrap())).unwrap();
    write(&mut disk, 0, &[7; 4 * BLOCK as usize]).unwrap();
    let before = file.metadata().unwrap().blocks();
    disk.zero(0, 4 * BLOCK).unwrap();
    assert!(file.metadata().unwrap().blocks() <= before - 4 * BLOCK / 512);
    assert!(read(&disk, 0, 4 * BLOCK).iter().all(|byte| *byte == 0));
}
