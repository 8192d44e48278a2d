//! Whether it pays to wait for more requests.
//!
//! Clients that wait for their answers before they ask again can be counted: the most requests that were inside at
//! once is the number of clients. While fewer are inside, the others are about to ask and a batch waits for them, up
//! to its delay limit; once all are inside, nobody can come before somebody is answered, and waiting is time lost. A
//! lone client therefore does not wait, once a few waits in vain have shown that it is alone. Two waits in vain shrink
//! the number halfway to what was seen.

use std::time::{Duration, Instant};

/// `parameters` key of the model configuration that chooses the rule, and its values.
pub(crate) const PARAMETER: &str = "TRIREME_QUEUE_DELAY";
pub(crate) const ADAPTIVE: &str = "adaptive";
pub(crate) const FIXED: &str = "fixed";

/// What is known of the clients of a model.
#[derive(Clone, Debug)]
pub(crate) struct Company {
    /// Triton's plain rule: every batch waits for its delay limit.
    fixed: bool,
    /// Most requests inside at once, as far as they have shown themselves lately.
    clients: usize,
    /// Requests inside instances.
    running: usize,
    /// When each running batch began, with its number of requests, by instance.
    runs: Vec<(usize, Instant, usize)>,
    /// Moving average of the time of a run.
    run_time: Duration,
    /// Batches in a row that waited to their limit.
    waits_in_vain: u32,
}

impl Company {
    /// `expected` clients are taken for granted until it shows how many there are.
    pub(crate) fn new(fixed: bool, expected: usize) -> Self {
        Self {
            fixed,
            clients: expected,
            running: 0,
            runs: Vec::new(),
            run_time: Duration::ZERO,
            waits_in_vain: 0,
        }
    }

    /// A request has come; `waiting` counts it.
    pub(crate) fn arrived(&mut self, waiting: usize) {
        self.clients = self.clients.max(waiting + self.running);
    }

    /// A batch has begun to run; `waiting` requests are left.
    pub(crate) fn began(&mut self, instance: usize, requests: usize, now: Instant) {
        self.running += requests;
        self.runs.push((instance, now, requests));
    }

    /// A batch has ended.
    pub(crate) fn ended(&mut self, instance: usize, now: Instant) {
        if let Some(at) = self.runs.iter().position(|(of, _, _)| *of == instance) {
            let (_, start, requests) = self.runs.swap_remove(at);
            self.running = self.running.saturating_sub(requests);
            let time = now.saturating_duration_since(start);
            self.run_time = match self.run_time {
                Duration::ZERO => time,
                average => average - average / 8 + time / 8,
            };
        }
    }

    /// Moving average of the time of a run.
    pub(crate) fn run_time(&self) -> Duration {
        self.run_time
    }

    /// Instances that run.
    pub(crate) fn busy(&self) -> usize {
        self.runs.len()
    }

    /// A batch was taken before its limit, or at it: then `in_vain`, with so many requests waiting in all.
    pub(crate) fn waited(&mut self, in_vain: bool, waiting: usize) {
        self.waits_in_vain = if in_vain { self.waits_in_vain + 1 } else { 0 };
        // One late round is a hiccup of the machine or the network; only more of them mean that clients have left.
        if self.waits_in_vain < 2 {
            return;
        }
        self.waits_in_vain = 0;
        let inside = waiting + self.running;
        let absent = self.clients.saturating_sub(inside);
        self.clients -= absent.div_ceil(2);
    }

    /// Whether another request can be expected before `limit`, with `waiting` of them here.
    pub(crate) fn is_expected(&self, waiting: usize, now: Instant, limit: Instant) -> bool {
        if self.fixed || waiting + self.running < self.clients {
            return true;
        }
        // Everybody is inside. Those whose run ends in time ask again.
        self.runs.iter().any(|(_, start, _)| (*start + self.run_time).max(now) + self.run_time / 8 < limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_lone_client_is_not_kept_waiting() {
        let now = Instant::now();
        let mut company = Company::new(false, 0);
        for round in 0..5 {
            let now = now + MS * round;
            company.arrived(1);
            assert!(!company.is_expected(1, now, now + 2 * MS));
            company.began(0, 1, now);
            company.ended(0, now + MS / 2);
        }
    }

    #[test]
    fn waits_until_everybody_who_was_seen_is_here() {
        let now = Instant::now();
        let mut company = Company::new(false, 0);
        (1..=16).for_each(|waiting| company.arrived(waiting));
        company.began(0, 16, now);
        company.ended(0, now + MS);
        assert!(company.is_expected(15, now + MS, now + 3 * MS));
        assert!(!company.is_expected(16, now + MS, now + 3 * MS));
    }

    #[test]
    fn those_who_run_are_waited_for_only_if_they_end_in_time() {
        let now = Instant::now();
        let mut company = Company::new(false, 0);
        company.arrived(1);
        company.began(0, 1, now);
        company.ended(0, now + 4 * MS);
        company.arrived(1);
        company.began(0, 1, now + 5 * MS);
        company.arrived(1);
        assert!(!company.is_expected(1, now + 6 * MS, now + 8 * MS), "the run ends 9 ms in");
        assert!(company.is_expected(1, now + 6 * MS, now + 16 * MS));
    }

    #[test]
    fn clients_that_left_are_forgotten() {
        let mut company = Company::new(false, 0);
        company.arrived(64);
        let waits = std::iter::repeat_with(|| company.waited(true, 1)).take(14).count();
        assert_eq!((waits, company.clients), (14, 1));
    }

    #[test]
    fn the_fixed_rule_always_waits() {
        let now = Instant::now();
        assert!(Company::new(true, 0).is_expected(1, now, now + MS));
    }
}
