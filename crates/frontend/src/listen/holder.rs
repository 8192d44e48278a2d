//! Which process listens on a port, from Linux' `/proc`; elsewhere, or where `/proc` keeps it secret, nobody.

use std::path::Path;

/// `process 1234 (name)` for the first process found that listens on the port.
pub(super) fn of_port(port: u16) -> Option<String> {
    let inodes: Vec<String> = ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .filter_map(|table| fs_err::read_to_string(table).ok())
        .flat_map(|table| listening_inodes(&table, port))
        .collect();
    if inodes.is_empty() {
        return None;
    }
    let links: Vec<String> = inodes.iter().map(|inode| format!("socket:[{inode}]")).collect();
    fs_err::read_dir("/proc").ok()?.flatten().find_map(|process| {
        let pid =
            process.file_name().into_string().ok().filter(|name| name.bytes().all(|b| b.is_ascii_digit()))?;
        let holds = holds_any(&process.path().join("fd"), &links);
        holds.then(|| {
            let name = fs_err::read_to_string(process.path().join("comm")).unwrap_or_default();
            format!("process {pid} ({})", name.trim())
        })
    })
}

fn holds_any(descriptors: &Path, links: &[String]) -> bool {
    let Ok(entries) = fs_err::read_dir(descriptors) else { return false };
    entries.flatten().any(|entry| {
        fs_err::read_link(entry.path())
            .is_ok_and(|target| target.to_str().is_some_and(|target| links.iter().any(|link| link == target)))
    })
}

/// Inodes of the listening sockets on a port, from a table as `/proc/net/tcp`: column 2 is the local address with
/// the port in hexadecimal, column 4 the state (`0A` listens), column 10 the inode.
fn listening_inodes(table: &str, port: u16) -> Vec<String> {
    let suffix = format!(":{port:04X}");
    let row = |line: &str| {
        let columns: Vec<&str> = line.split_ascii_whitespace().collect();
        let listens = columns.get(1)?.ends_with(&suffix) && *columns.get(3)? == "0A";
        if listens { columns.get(9).map(|inode| (*inode).to_owned()) } else { None }
    };
    table.lines().skip(1).filter_map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_kernels_table() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
             0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000 0 4242 1 0 100 0 0 10 0\n\
             1: 0100007F:1F40 0100007F:9999 01 00000000:00000000 00:00000000 00000000  1000 0 4243 1 0 20 4 30 10 -1\n\
             short line\n";
        assert_eq!(listening_inodes(table, 8000), ["4242"]);
        assert!(listening_inodes(table, 8001).is_empty());
    }
}
