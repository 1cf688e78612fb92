//! The form in which the VMM takes a kernel, around any code. Used by the tests of `node`'s driver too.

/// Where a guest is linked to.
const ORIGIN: u64 = 0x10_0000;

/// An ELF of one segment at [`ORIGIN`], with the note by which a kernel says where PVH shall enter it.
pub fn pvh(code: &[u8]) -> Vec<u8> {
    const NOTE: [u8; 20] = [4, 0, 0, 0, 4, 0, 0, 0, 18, 0, 0, 0, b'X', b'e', b'n', 0, 0, 0, 0x10, 0];
    let (header, entry) = (64u64, 56u64);
    let note_at = header + 2 * entry;
    let code_at = 0x1000u64;
    let mut elf = vec![0u8; code_at as usize];
    let mut put = |at: u64, bytes: &[u8]| elf[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    put(0, b"\x7fELF\x02\x01\x01");
    put(16, &2u16.to_le_bytes());
    put(18, &62u16.to_le_bytes());
    put(20, &1u32.to_le_bytes());
    put(24, &ORIGIN.to_le_bytes());
    put(32, &header.to_le_bytes());
    put(52, &64u16.to_le_bytes());
    put(54, &56u16.to_le_bytes());
    put(56, &2u16.to_le_bytes());
    let segment = |kind: u32, at: u64, address: u64, size: u64| {
        let mut segment = Vec::new();
        segment.extend(kind.to_le_bytes());
        segment.extend(7u32.to_le_bytes());
        for word in [at, address, address, size, size, 4096] {
            segment.extend(word.to_le_bytes());
        }
        segment
    };
    put(header, &segment(1, code_at, ORIGIN, code.len() as u64));
    let mut note = segment(4, note_at, 0, NOTE.len() as u64);
    note[48..].copy_from_slice(&4u64.to_le_bytes());
    put(header + entry, &note);
    put(note_at, &NOTE);
    elf.extend_from_slice(code);
    elf
}
