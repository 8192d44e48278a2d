//! config.pbtxt: any bytes are a configuration or an error that can be shown; what was read prints to the same again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use trireme_config::{parse_pbtxt, print_pbtxt, to_json};

fuzz_target!(|text: &[u8]| {
    match parse_pbtxt(text, "config.pbtxt") {
        Ok(parsed) => {
            let printed = print_pbtxt(&parsed.config);
            let again = parse_pbtxt(printed.as_bytes(), "config.pbtxt");
            let again = again.unwrap_or_else(|errors| panic!("what was printed is refused: {errors}\n{printed}"));
            assert_eq!(print_pbtxt(&again.config), printed);
            let _ = to_json(&parsed.config);
        }
        Err(errors) => assert!(!errors.to_string().is_empty()),
    }
});
