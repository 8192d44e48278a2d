//! Decisions for given queues, and the rules of batches as properties.

use proptest::prelude::*;

use super::*;

const US: Duration = Duration::from_micros(1);

fn rules(max_rows: usize, preferred: &[usize], delay: u32) -> Rules {
    Rules { max_rows, preferred: preferred.to_vec(), max_delay: US * delay, single: false }
}

/// Decides for requests given as (rows, kind, microseconds waited).
fn decide(requests: &[(usize, u8, u32)], rules: &Rules, company: &Company) -> (Decision, Instant) {
    let now = Instant::now() + US * 1_000_000;
    let queue = requests.iter().map(|(rows, kind, waited)| Candidate {
        rows: *rows,
        kind,
        since: now - US * *waited,
    });
    (next_batch(queue, now, rules, company), now)
}

fn fixed(requests: &[(usize, u8, u32)], rules: &Rules) -> Decision {
    decide(requests, rules, &Company::new(true, 0)).0
}

#[test]
fn without_a_delay_everything_that_fits_runs() {
    let rules = rules(4, &[4], 0);
    assert_eq!(fixed(&[], &rules), Decision::Idle);
    assert_eq!(fixed(&[(1, 0, 0)], &rules), Decision::Run(Picked::First(1)));
    assert_eq!(fixed(&[(1, 0, 0); 9], &rules), Decision::Run(Picked::First(4)));
    assert_eq!(fixed(&[(3, 0, 0), (2, 0, 0)], &rules), Decision::Run(Picked::First(1)));
}

#[test]
fn waits_for_its_delay_and_no_longer() {
    let rules = rules(8, &[8], 100);
    let (decision, now) = decide(&[(1, 0, 30), (1, 0, 10)], &rules, &Company::new(true, 0));
    assert_eq!(decision, Decision::WaitUntil(now + US * 70));
    assert_eq!(fixed(&[(1, 0, 100), (1, 0, 0)], &rules), Decision::Run(Picked::First(2)));
    assert_eq!(fixed(&[(1, 0, 0); 8], &rules), Decision::Run(Picked::First(8)));
}

#[test]
fn a_preferred_size_runs_at_once_until_the_delay_is_over() {
    let rules = rules(8, &[2, 4], 100);
    assert_eq!(fixed(&[(1, 0, 5), (1, 0, 5), (1, 0, 5)], &rules), Decision::Run(Picked::First(2)));
    assert_eq!(fixed(&[(1, 0, 5); 5], &rules), Decision::Run(Picked::First(4)));
    assert_eq!(fixed(&[(1, 0, 100), (1, 0, 5), (1, 0, 5)], &rules), Decision::Run(Picked::First(3)));
    // The largest preferred size is passed over; what is below it runs.
    assert_eq!(fixed(&[(3, 0, 5), (3, 0, 5)], &rules), Decision::Run(Picked::First(1)));
}

#[test]
fn kinds_do_not_mix_and_do_not_block_one_another() {
    let rules = rules(2, &[2], 100);
    // The first kind waits for company, the second is full and runs.
    let mixed = [(1, 0, 10), (1, 1, 5), (1, 1, 5)];
    assert_eq!(fixed(&mixed, &rules), Decision::Run(Picked::At(vec![1, 2])));
    let alternating = [(1, 0, 10), (1, 1, 9), (1, 0, 8), (1, 1, 7)];
    assert_eq!(fixed(&alternating, &rules), Decision::Run(Picked::At(vec![0, 2])));
}

#[test]
fn a_single_scheduler_joins_nothing() {
    assert_eq!(fixed(&[(5, 0, 0), (5, 0, 0)], &Rules::single()), Decision::Run(Picked::First(1)));
}

#[test]
fn runs_early_when_nobody_is_expected() {
    let rules = rules(8, &[8], 2000);
    let mut company = Company::new(false, 0);
    company.arrived(3);
    let (decision, now) = decide(&[(1, 0, 1), (1, 0, 1)], &rules, &company);
    assert_eq!(decision, Decision::WaitUntil(now + US * 1999));
    let (decision, _) = decide(&[(1, 0, 1), (1, 0, 1), (1, 0, 0)], &rules, &company);
    assert_eq!(decision, Decision::Run(Picked::First(3)));
}

proptest! {
    /// No batch over its limit, of two kinds, or past the delay of its oldest request; a wait always ends.
    #[test]
    fn batches_keep_the_rules(
        requests in prop::collection::vec((1..6_usize, 0..3_u8, 0..300_u32), 0..40),
        max_rows in 1..17_usize,
        preferred in prop::collection::btree_set(1..17_usize, 0..4),
        delay in 0..200_u32,
        is_fixed in any::<bool>(),
        clients in 0..50_usize,
    ) {
        let preferred: Vec<usize> = preferred.into_iter().filter(|size| *size <= max_rows).collect();
        let rules = rules(max_rows, &preferred, delay);
        let mut company = Company::new(is_fixed, 0);
        company.arrived(clients.max(requests.len()));
        let mut requests: Vec<_> = requests.into_iter().map(|(rows, kind, age)| (rows.min(max_rows), kind, age)).collect();
        requests.sort_by_key(|(_, _, age)| std::cmp::Reverse(*age));
        let (decision, now) = decide(&requests, &rules, &company);
        match decision {
            Decision::Idle => prop_assert!(requests.is_empty()),
            Decision::WaitUntil(time) => {
                let oldest = requests.iter().map(|(_, _, age)| *age).max().unwrap_or(0);
                prop_assert!(oldest < delay, "a request past its delay runs");
                prop_assert!(time > now && time <= now + US * (delay - oldest));
            }
            Decision::Run(picked) => {
                let places = match picked {
                    Picked::First(count) => (0..count).collect(),
                    Picked::At(places) => places,
                };
                prop_assert!(!places.is_empty() && places.is_sorted());
                let batch: Vec<_> = places.iter().map(|at| requests[*at]).collect();
                let rows: usize = batch.iter().map(|(rows, _, _)| rows).sum();
                prop_assert!(rows <= max_rows);
                prop_assert!(batch.iter().all(|(_, kind, _)| *kind == batch[0].1));
                // Within a kind nobody is passed over.
                let of_kind: Vec<usize> = (0..requests.len()).filter(|at| requests[*at].1 == batch[0].1).collect();
                prop_assert_eq!(&of_kind[..places.len()], &places[..]);
                // Without a reason to run early, a batch is whole.
                let next = of_kind.get(places.len()).map(|at| requests[*at].0);
                let is_over = batch[0].2 >= delay;
                if is_over {
                    prop_assert!(next.is_none_or(|next| rows + next > max_rows));
                }
            }
        }
    }
}
