package mutants

// short is how many of the first mutants run with the other tests.
const short = 2

// twins is the test of what time does to a wallet.
const twins = "TestTwins_NoAnswerDependsOnWhoLooked"

// Parts of statements that several mutants break.
const collided = "perform metered._collided();"

// freeing are the kinds of entries after which _append marks the line of their scope.
const freeing = "'d', 'r', 'l', 'u', 'x', 'k', 's'"

var all = []Mutant{
	// Entries and their guard.
	{"no guard of a charge", "_write_charges", "if seqs is null then\n                " + collided, "if seqs is null then\n                null;", "./budget", "TestCharge_CollisionIsASerializationFailure"},
	{"a refund is beyond its charge", "refund", "when amount > remaining or remaining = 0 then 'excess'", "when remaining = 0 then 'excess'", "./budget", "TestRefund_NeverSumsPastTheCharge"},
	{"a token is bound to no purpose", "consume_token", "(t.purpose = for_purpose and t.subject = for_subject and", "(t.subject = for_subject and", "./tokens", "TestConsume_WrongPurposeOrSubjectDoesNotBurnTheToken"},
	{"no lock of a scope", "_write_charges", "if not look and (cardinality(charges) > 1 or", "if false and (cardinality(charges) > 1 or", "./budget", "TestLock_TimeoutIsBusyWithinItsBounds"},
	{"a charge is dated by now()", "_write_charges", "at := metered.clock();  -- after the lock", "at := now();  -- after the lock", "./budget", "TestWindow_SlowTransactionDatesItsEntryWhenItCharges"},
	{"a charge is dated before its wait", "_write_charges", "at := metered.clock();  -- after the lock", "at := statement_timestamp();  -- after the lock", "./budget", "TestWindow_WaitingLongerThanTheWindowDatesTheEntryAfterTheWait"},
	{"a charge meets no purge", "_write_charges", "limit 1 for key share;\n        end if;", "limit 1;\n        end if;", "./budget", "TestCharge_OldSnapshotNeverGetsPastAPurge"},
	{"a transition meets no purge", "_entry_for_write", "limit 1 for key share;", "limit 1;", "./holds", "TestTransitions_OldSnapshotNeverGetsPastAPurge"},
	{"locks are taken in any order", "_lock_all_scopes", "select distinct coalesce(s.key, metered._scope_key(s.scope)) from unnest(scopes, keys) s(scope, key) order by 1)",
		"select x.k from (select distinct coalesce(s.key, metered._scope_key(s.scope)) as k from unnest(scopes, keys) s(scope, key)) x order by random())", "./budget", "TestCharge_ManyScopesInOppositeOrdersDoNotDeadlock"},
	{"a stale refusal is final", "_refuse_stale", "perform metered._append(tip);", "null;", "./internal/command", "TestDo_NoRefusalOfAnOldSnapshotIsFinal"},
	{"a refusal writes", "_write_charges", "raise exception 'a limit refuses the charge' using errcode = 'MT001', detail = refused;\n            end if;",
		"raise exception 'a limit refuses the charge' using errcode = 'MT001', detail = refused;\n            end if;\n            perform metered.credit(charges[1].scope, null, 1, false, wait_ms, null, false);", "./budget", "TestCharge_RefusalNamesEveryLimitAndLeavesTheTransactionUsable"},

	// Up to so much.
	{"each level takes what it has", "_write_up_to", "(select max(x) from", "(select min(x) from", "./budget", "TestChargeUpTo_TakesTheSameOfEachLevel"},
	{"the second attempt is later", "_write_up_to", "hold.at := posted.at;", "hold.at := null;", "./wallet", "TestChargeUpTo_JudgesByOneMoment"},
	{"a hold is less than its minimum", "_write_up_to", "least(units - fewest,", "least(units - 1,", "./holds", "TestPlace_UpToIsAtLeastTheMinimum"},
	{"the excess is each line's own", "_as_far_as_admitted", "coalesce(most, less[i])", "less[i]", "./holds", "TestCapture_OverEvenlyTakesTheSameOfEqualLines"},

	// Windows, periods, refunds, purges, the clock.
	{"a window sees credits", "_write_charges", "u := tip.spent - base_spent - case", "u := tip.spent - tip.credited - base_spent - case", "./budget", "TestLedger_AgreesWithTheModel"},
	{"a refund counts when it is made", "_spent_since", "case when b.refunded = tip.refunded then 0 else metered._refunds_after(tip.scope, tip.seq, b.seq) end", "(tip.refunded - b.refunded)", "./budget", "TestRefund_LeavesTheWindowTogetherWithItsCharge"},
	{"a window is closed at its beginning", "_write_charges", "since := at - l.win;", "since := at - l.win - interval '1 microsecond';", "./budget", "TestWindow_ChargeLeavesExactlyWhenItsAgeIsTheWindow"},
	{"a period is open at its beginning", "_period_at", "if starts > t then", "if starts >= t then", "./budget", "TestPerMonth_BeginsWithItsFirstMoment"},
	{"a retry time is too early", "_leaves_at", "return at + win;", "return at + win - interval '1 microsecond';", "./budget", "TestWindow_RetryAfterIsExactWhereverTheRefundsAre"},
	{"a purge is no prefix", "purge_scope", "l.seq > upto and l.seq < keep;", "l.seq > upto and l.seq < keep and l.seq % 3 > 0;", "./budget", "TestVerify_AfterAPurgeBeginsWithTheKeptEntries"},
	{"a purge takes entries of a window", "purge_scope", "keep := greatest(1, ((keep - 1) & ~15) + 1);", "keep := greatest(1, ((keep - 1) & ~15) + 17);", "./budget", "TestPurge_KeepsWindowsExactAndIsIdempotent"},
	{"a forgotten scope lets an old snapshot in", "purge_scope", "perform metered._append(tip);\n        delete from metered.ledger l where l.scope = of_scope and l.seq = tip.seq;", "", "./budget", "TestForget_GivesUpBesideAWriterWithoutTheLock"},
	{"a scope with held units is forgotten", "purge_scope", "tip.held = 0 and", "true and", "./holds", "TestForget_AScopeIsKeptWhileAHoldOrAClaimOfItCounts"},
	{"a repair begins no epoch", "repair_clock", "e.epoch := e.epoch + 1;", "", "./budget", "TestClock_RepairLetsChargesPassAndNothingLeaveEarly"},
	{"an anchor outlives a repair", "repair_clock", "e.anchor_at := null;", "", "./budget", "TestCharge_AnAnchorEndsWithTheClockItIsOf"},
	{"a series has no due minimum", "usage_at", "spent := tip.spent + coalesce(due[i], 0);", "spent := tip.spent;", "./holds", "TestAtLeast_IsOnTheInvoiceOfTheMonthInWhichItFellDue"},

	// Scopes that must exist, events, commands.
	{"a retired scope exists", "_absence", "when r.retired_at is not null then 'retired'", "when false then 'retired'", "./holds", "TestPlace_OfAScopeThatMustExistAndDoesNot"},
	{"an old snapshot decides that a scope exists", "_resource_for_write", "where x.scope = of_scope for share;", "where x.scope = of_scope;", "./budget", "TestMustExist_AnOldSnapshotDecidesNothing"},
	{"an event's id stands for two contents", "_recorded_events", "when o.fingerprint = e.fingerprint then 'replay' else 'conflict'", "else 'replay'", "./budget", "TestIngest_AnIDStandsForOneContent"},
	{"an event is new to an old snapshot", "_recorded_events", "if metered._one_snapshot() then", "if false then", "./budget", "TestIngest_AnOldSnapshotIsRetried"},
	{"a repetition runs again", "begin_command", "if at is not null then", "if false then", "./internal/command", "TestDo_ReplayReturnsTheFirstResultAndDoesNothingMore"},
	{"a record is new to an old snapshot", "begin_command", "if metered._one_snapshot() then", "if false then", "./internal/command", "TestDo_AnOldSnapshotDoesNotHideARecord"},
	{"a retired id runs", "begin_command", "if command.issued_at <= horizon then", "if false then", "./internal/command", "TestDo_APurgeThatCommitsBetweenItsLooksDoesNotLetAnIDRunTwice"},
	{"a second record is dropped", "complete_command", "raise exception 'could not serialize access: the operation was recorded meanwhile' using errcode = '40001';", "null;", "./internal/command", "TestDo_ARecordThatAppearsMeanwhileTakesTheCommandBack"},
	{"a command is committed unfinished", "block_commit", "raise exception 'the command of this transaction is not complete' using errcode = 'MT004';", "null;", "./internal/command", "TestTx_TheBareConnectionCannotCommitEither"},
	{"a job's key makes two jobs", "claim_job_key", "created := found;", "created := true;", "./jobs", "TestEnqueue_KeyUsedTwiceInOneTransactionMakesOneJob"},

	// The short way, and what keeps calls off it.
	{"the short way is taken ahead of the clock", "internal/schema/macros.go", "`$tip.at <= $at and (", "`(", "./budget", "TestClock_AheadBeyondTheToleranceFailsForWindowsOnly"},
	{"the short way passes due minima", "internal/schema/macros.go", "($tip.next_due <= $at) is not true and ", "", "./holds", "TestAtLeast_IsChargedOnceByTheFirstWriter"},
	{"the short way draws of no lot", "internal/schema/macros.go", "$tip.lots_end is null and ", "", "./wallet", "TestCharge_KeepsTheLimitsThatItNames"},
	{"the short way bounds a window by any anchor", "internal/schema/macros.go", "case when $tip.anchor_at <= $at - $win then", "case when $tip.anchor_at is not null then", "./budget", "TestCharge_AnAnchorServesNoWindowThatBeginsBeforeIt"},
	{"the short way forgets refunds", "_append_short", "and coalesce(b.refunded, 0) = t.refunded and (", "and (", "./budget", "TestChargePlain_AnswersAsTheFullFunctionDoes"},
	{"the short way runs a repetition again", "internal/schema/macros.go", "exists (select from metered.operations o where o.tenant = $tenant and o.id = $id)\n                or $issued <=", "$issued <=", "./internal/command", "TestDo_ACommandWithoutAFunctionIsOneFlush"},
	{"the short way runs a retired id", "internal/schema/macros.go", "or $issued <= (select h.at from metered.operations_horizon h where h.one)", "", "./internal/command", "TestDo_APurgeThatCommitsBetweenItsLooksDoesNotLetAnIDRunTwice"},
	{"the short way drops a second record", "_complete_short", "raise exception 'could not serialize access: the operation was recorded meanwhile'\n            using errcode = '40001';", "null;", "./internal/command", "TestDo_ARecordThatAppearsMeanwhileTakesTheCommandBack"},
	{"the short way ends another transaction's command", "complete_command_plain", "current_setting('metered_tx.command', true) = marker", "true", "./internal/command", "TestTx_TheBareConnectionOfAPlainCommandCannotCommitEither"},

	// Tokens.
	{"a token is good at its end", "consume_token", "t.expires_at > now_at) is true", "t.expires_at >= now_at) is true", "./tokens", "TestConsume_ExpiresAtEquality"},
	{"a use is not counted", "consume_token", "set used = t.used + 1,", "set used = t.used,", "./tokens", "TestConsume_SeveralUses"},
	{"a token is unknown to an old snapshot", "consume_token", "if status = 'unknown' and metered._one_snapshot() then", "if false then", "./tokens", "TestConsume_ATokenMintedSinceTheSnapshotIsRetryable"},
	{"a revoked token is good", "revoke_tokens", "set revoked = t.expires_at > now_at, ended_at = least(now_at, t.expires_at)", "set revoked = t.expires_at > now_at", "./tokens", "TestRevokeSubject_EndsAndCountsLiveTokens"},
	{"two calls replace a token at once", "replace_token", "perform metered._lock_keys(array[key], wait_ms);", "", "./tokens", "TestReplace_RacingCallersLeaveOneLiveToken"},
	{"a purge deletes a live token", "purge_tokens", "least(coalesce(cutoff, '-infinity'), metered.clock())", "coalesce(cutoff, '-infinity')", "./tokens", "TestPurge_NeverDeletesALiveTokenWhateverTheArguments"},

	// Holds.
	{"a hold ends before it is due", "_overdue", "l.due <= clk", "l.due <= clk + interval '1 second'", "./holds", "TestHolds_AgreeWithTheModel"},
	{"a hold that is due is captured", "_lock_holds", "(h.state <> 'h' or h.due > clk) then\n                nos", "true then\n                nos", "./holds", "TestExpiry_GraceIsForCaptures"},
	{"another's hold can be ended", "_lock_holds", "and case when of_holder = '' or y.holder = of_holder then metered._try_keys(y.keys) end", "and metered._try_keys(y.keys)", "./holds", "TestHolder_AnothersHoldLooksLikeNone"},
	{"a hold's id stands for two contents", "_placed_before", "case when was.fingerprint = hold.fingerprint then 'same' else 'conflict' end", "'same'", "./holds", "TestPlace_TheSameIDIsPlacedOnce"},
	{"a claim has two holders", "_placed_before", "elsif state = 'c' or was.holder <> hold.holder then", "elsif false then", "./holds", "TestTaken_SaysInSecondsWhenToComeAgain"},
	{"a purge frees a confirmed claim", "purge_holds", "(h.claim is null or h.state <> 'c' or h.returned)", "true", "./holds", "TestPurge_KeepsAClaimThatStands"},
	{"a horizon goes back", "purge_holds", "where z.one and z.at < latest;", "where z.one;", "./holds", "TestPurge_OfAnOlderIDTakesNothingBack"},
	{"a capture takes more than is held", "capture_holds", "elsif u.amount > l.open and terms.policy = 'refuse' then", "elsif false then", "./holds", "TestHolds_AgreeWithTheModel"},
	{"an extension passes the ceiling", "extend_holds", "elsif h.deadline + by > h.ceiling then", "elsif false then", "./holds", "TestExtend_EndsAtTheCeiling"},
	{"a refusal waits for holds of its own", "_check_limits", "own := w.units;", "own := 0;", "./holds", "TestRefusal_DoesNotCountOnTheEndOfItsOwnHolds"},
	{"a retry time forgets minima that are due", "_check_limits", "clk, m.units, m.leave);\n            end if;\n            -- The end", "clk, null, null);\n            end if;\n            -- The end", "./holds", "TestAtLeast_LeavesItsWindowAndItsPeriod"},
	{"a minimum is charged to a lifetime alone", "_minima", "and greatest(l.due, tip.at) > coalesce(since, '-infinity')", "and since is null", "./holds", "TestAtLeast_CountsWhenItFellDueSweptOrNot"},
	{"a session runs twice", "open_session", "status := case when was.fingerprint = hold.fingerprint then 'running' else 'busy' end;", "null;", ".", "TestOpen_OneOfManyRuns"},

	// Thresholds.
	{"a threshold is reported without its state", "_cross_thresholds", "tips[i] := tip;", "", "./budget", "TestThreshold_OfAPeriodIsReportedOnceInEach"},
	{"a threshold is crossed in silence", "_cross_thresholds", "silent := silent or l.telling is not true;", "", "./budget", "TestThreshold_IsReportedByEveryWayToCharge"},
	{"a plan brings no lot after the first two", "_start_lot", "perform metered._renew_lot(l, e.seq);", "null;", "./wallet", "TestRenews_YearsThatNobodyTouchedAreWrittenByOneCall"},
	{"a reader counts no lot that begins", "_due_lots", "lapsed := lapsed - child.pending;", "null;", "./wallet", "TestRenews_YearsThatNobodyTouchedAreWrittenByOneCall"},
	{"a shared cap counts each lot alone", "_rolls_among", "if (l.plan).roll_shared is not true or", "if true or", "./wallet", "TestRenews_YearsThatNobodyTouchedAreWrittenByOneCall"},
	{"a scope remembers any number of thresholds", "_kept_reports", "raise exception 'the scope has more thresholds than %', most using errcode = 'MT012', detail = tip.scope;", "null;", "./budget", "TestThreshold_AScopeHasABoundedNumber"},
	{"a repair forgets the reports of a period", "_reported_after_repair", "while (was ->> 'from')::timestamptz > clk loop", "while false loop", "./budget", "TestThreshold_OfAPeriodIsReportedOnceThoughTheClockJumpsPastItsEnd"},
	{"a threshold refuses a cost that was incurred", "_cross_captured", "exception when sqlstate 'MT002' or", "exception when", "./holds", "TestThresholds_NeverRefuseACostThatWasIncurred"},

	// Leases and carving.
	{"a unit of a lease is spent twice", "", "", "alter table metered.lease_spends drop constraint lease_spends_apart", "./leases", "TestRanges_OfTwoSessionsAtATimeAreSpentOnce"},
	{"a lease is spent while it is settled", "_spend_range", "if metered._try_lock_shared(of_fence) then", "if true then", "./leases", "TestFence_OpenSpendsAreWaitedForAndNewOnesRefused"},
	{"a lease is spent by another's fence", "_spend_range", "l.no = of_lease and l.fence = of_fence and", "l.no = of_lease and", "./leases", "TestRanges_AreSpentByTheLeasesOwnKeyOnly"},
	{"an old snapshot spends from a settled lease", "_spend_range", "if metered._one_snapshot() then", "if false then", "./leases", "TestFence_AnOldSnapshotDoesNotSpendFromASettledLease"},
	{"a lease is settled twice", "settle_lease", "when l.settled_at is not null then 'closed'", "when false then 'closed'", "./leases", "TestSettle_AnEndedLeaseIsSettledByAnybodyAndNotFreed"},
	{"another settles a lease before its end", "settle_lease", "when l.owner <> of_owner and l.ends_at > metered.clock() then 'early'", "when false then 'early'", "./leases", "TestSettle_AnEndedLeaseIsSettledByAnybodyAndNotFreed"},
	{"a lease in memory settles more than it had", "settle_lease", "l.owner = of_owner and told <= l.granted", "l.owner = of_owner", "./leases", "TestSettle_OfMemoryTakesTheOwnersWordUpToTheGrant"},
	{"a settlement is dated before the spends", "_close_lease", "tip.at := greatest(tip.at, last);", "", "./leases", "TestSettle_IsDatedNoEarlierThanTheSpends"},
	{"a child is settled before its holds", "end_child", "if held = 0 then", "if true then", "./leases", "TestCarve_HoldsOfTheChildEndBeforeItIsSettled"},
	{"a closed child lets charges in", "_check_limits", "if tip.next_due = '-infinity' then", "if false then", "./leases", "TestCarve_AClosedChildLetsNothingIn"},
	{"a message that is late makes credit", "receive_child", "when units = 0 or ends <= clk then 'late'", "when false then 'late'", "./leases", "TestCarve_MessagesOfAnotherClusterComeInAnyOrder"},
	{"a lease of a retired scope goes on", "retire_scopes", "and y.mode in ('s', 'm') and y.ends_at > clk;", "and false;", "./leases", "TestRetire_EndsTheLeasesOfItsScope"},
	{"units are let in after their slice's end", "leases/slice.go", "return offset, now.Before(s.ends) && now.UnixNano() < s.endsWall", "return offset, now.UnixNano() > 0", "./leases", "TestSlice_EndsByEitherClock"},

	// Parked jobs.
	{"a credit marks no line", "_append", freeing, "'r', 'l', 'u', 'x', 'k', 's'", "./jobs", "TestGated_EachWayToFreeUnitsMarksTheLine/credit"},
	{"a refund marks no line", "_append", freeing, "'d', 'l', 'u', 'x', 'k', 's'", "./jobs", "TestGated_EachWayToFreeUnitsMarksTheLine/refund"},
	{"a release marks no line", "_release_lines", "marked := metered._mark_freed(written[i]);", "null;", "./jobs", "TestGated_StartsWhatFitsAndParksTheRest"},
	{"a capture marks no line", "capture_holds", "marked := metered._mark_freed(l.scope);", "", "./jobs", "TestGated_CapturedUnitsLeaveTheWindowInTime"},
	{"a clock repair marks no line", "_append", freeing, "'d', 'r', 'l', 'u', 'x', 's'", "./jobs", "TestGated_EachWayToFreeUnitsMarksTheLine/clock repair"},
	{"a scheduled lot marks no line", "_append", freeing, "'d', 'r', 'l', 'u', 'x', 'k'", "./jobs", "TestGated_ALotThatBeginsLaterStartsTheJob"},
	{"a line forgets the lot that begins", "_lot_begins", "y.pending > 0", "false", "./jobs", "TestGated_ALotThatBeginsLaterStartsTheJob"},
	{"a line is marked in silence", "_mark_freed", "perform metered._wake_releasers();", "null;", "./jobs", "TestRun_HearsOfFreedUnitsAndOfEarlierLooksAtOnce"},
	{"a job joins a line in silence", "_join_line", "perform metered._wake_releasers();", "null;", "./jobs", "TestRun_HearsOfFreedUnitsAndOfEarlierLooksAtOnce"},
	{"an old snapshot marks no line", "_mark_freed", "elsif metered._one_snapshot() and not exists", "elsif false and not exists", "./jobs", "TestGated_FreedByAnOldSnapshot"},
	{"a job joins during a look and is forgotten", "_join_line", "next_at = least(p.next_at, excluded.wake_at),", "next_at = p.next_at,", "./jobs", "TestGated_AJobThatJoinsDuringALookIsNotForgotten"},
	{"units freed during a look are forgotten", "_release_line", "set again = s.after is not null and y.again where", "set again = false where", "./jobs", "TestGated_UnitsFreedDuringALookAreNotForgotten"},
	{"a job moves to another line and is forgotten", "_release_line", "perform metered._join_line(w.scope, c.key, coalesce(clk + w.retry, 'infinity'));", "perform metered._join_line(w.scope, c.key, 'infinity');", "./jobs", "TestGated_AJobInItsNextLineIsLookedAtInTime"},
	{"limits are asked for the first jobs alone", "_release_line", "if (cs is null or o.keys is null) and seen > room then", "if false then", "./jobs", "TestGated_LimitsAreAskedForTheWholeLine"},
	{"a job that fails stops its line", "_release_line", "exit when careful;", "", "./jobs", "TestGated_AJobThatFailsIsPassed"},
	{"a job starts before others of its turn", "_turn", "(select p.turns[of_priority] from metered.parked_scopes p where p.scope = of_scope),", "0,", "./jobs", "TestGated_TenantsTakeTurns"},
	{"a job that fits goes before the line", "park_jobs", "if busy is null then", "if true then", "./jobs", "TestRun_HearsOfFreedUnitsAndOfEarlierLooksAtOnce"},
	{"the hold of a running job is released", "jobs/ended.go", "and j.finalized_at is null), 'ended')", "and j.finalized_at is null and j.state <> 'running'), 'ended')", "./jobs", "TestRun_FindsJobsThatEndedElsewhere"},
	{"a burst takes the pool before its own", "_release_line", "if o.first is not null then", "if false then", "./jobs", "TestBurst_TakesTheTenantsOwnFirst"},
	{"a burst stays in its other line", "_release_line", "where j.job_id = r.job_id;", "where j.job_id = r.job_id and j.lane = r.lane;", "./jobs", "TestBurst_ATenantGetsItsMinimumAndWhatThePoolHasFree"},
	{"a burst joins a line as it starts", "_release_line", "and x.scope = (o.other).scope for update skip locked;", "and x.scope = (o.other).scope;", "./jobs", "TestBurst_AJobLeavesTheLineThatItJoinsJustNow"},
	{"a line counts bursts that left it", "_release_line", "update metered.parked_scopes y set waiting = y.waiting - 1 where y.scope = (o.other).scope;", "", "./jobs", "TestBurst_ATenantGetsItsMinimumAndWhatThePoolHasFree"},
	{"a burst waits for its own alone", "park_jobs", "exit when not j ? 'burst';", "exit;", "./jobs", "TestBurst_ATenantGetsItsMinimumAndWhatThePoolHasFree"},
	{"a burst is tried again by one choice", "rest_jobs", "exit when not j ? 'burst';", "exit;", "./jobs", "TestBurst_AFailedJobWaitsForEither"},
	{"a failed job keeps what it is to give back", "jobs/ended.go", "then 'rests' else ''", "then '' else ''", "./jobs", "TestGiveBack_AFailedJobWaitsInLineForItsNextAttempt"},
	{"a job that River took is parked", "jobs/ended.go", "and j.finalized_at is null and ` + betweenAttempts + `", "and j.finalized_at is null", "./jobs", "TestGiveBack_AJobThatRunsOrStartsKeepsItsUnits"},
	{"a job is charged for each attempt", "jobs/gate.go", "if c.Held > 0 {\n\t\t\tc.Amount = c.Held", "if true {", "./jobs", "TestGiveBack_AFailedJobWaitsInLineForItsNextAttempt"},
	{"a job joins a line by an old snapshot", "_lines", "if metered._one_snapshot() then", "if false then", "./jobs", "TestGiveBack_ReleasedByAnOldSnapshot"},
	{"a job is tried again before its time", "_lines", "x.not_before <= metered.clock()", "true", "./jobs", "TestGiveBack_AFailedJobWaitsInLineForItsNextAttempt"},
	{"a job that River ended keeps units", "jobs/release.go", "[]string{own.Hold}, \"River has", "nil, \"River has", "./jobs", "TestGiveBack_AJobThatRiverEndedAtItsStartHoldsNothing"},
	{"a job that River ended stays in line", "jobs/ended.go", "'metered:hold' = p.hold) = 0", "'metered:hold' = p.hold) < 0", "./jobs", "TestGiveBack_AJobBetweenAttemptsEndsInEachWay"},
	{"a job that was tried again by hand is dropped", "jobs/release.go", "!p.NotBefore.IsZero() && !slices.Contains(discarded, p.JobID)", "false", "./jobs", "TestGiveBack_AJobThatRiverEndedIsNotDropped"},
	{"a cancelled job stays pending", "jobs/parked.go", "err != nil || priority != nil || p.NotBefore.IsZero()", "err != nil || true", "./jobs", "TestGiveBack_AJobBetweenAttemptsEndsInEachWay"},
	{"a dropped job stays pending", "jobs/release.go", "if !p.NotBefore.IsZero() {", "if false {", "./jobs", "TestGiveBack_DropsAJobThatWaitedTooLongForItsNextAttempt"},
	{"a job that comes to rest before a release is lost", "jobs/release.go", "if j.Again {", "if j.Again && tx.Conn().IsClosed() {", "./jobs", "TestGiveBack_AJobThatComesToRestBeforeAReleaseIsNotLost"},
	{"a line has one class for all uses", "_class_of", "c.note ->> 'use'", "null", "./jobs", "TestGated_AJobForOneUseKeepsNoneOfAnotherWaiting"},
	{"a locked scope keeps others waiting", "_lines", "limit 10000", "limit 64", "./jobs", "TestGiveBack_ManyJobsOfALockedScopeKeepNoOtherJobWaiting"},
	{"each notice is a look", "jobs/run.go", "apart = min(max(minApart, 2*apart), maxApart); found", "apart = 0; found", "./jobs", "TestRun_NoticesOfAStrangerCostFewLooks"},
	{"a hold is released twice at once", "jobs/ended.go", "all = slices.Compact(all)", "", "./jobs", "TestRun_AJobThatEndedTwiceKeepsNoOtherHold"},
	{"a job that is lost stays lost", "jobs/ended.go", "found, err := e.parkAgain(ctx, pool, hold)", "found, err := int64(0), error(nil)", "./jobs", "TestRelease_FindsJobsThatStandInNoLine"},

	// Wallets.
	{"a lot is drawn after its end", "_write_charges", "if tip.lots_end <= greatest(at, tip.at) then", "if false then", "./wallet", "TestLot_EndsWhenItIsDueSweptOrNot"},
	{"lots are drawn in the order of their numbers", "_take_lots", "order by y.priority, y.expires_at, y.age limit 1;\n        if use is not null then\n            if u.rest", "order by y.no limit 1;\n        if use is not null then\n            if u.rest", "./wallet", "TestDraw_TakesByPriorityThenEarliestEndThenOldest"},
	{"a draw leaves the rest of its lot", "_take_lots", "l.rest - part,", "l.rest,", "./wallet", "TestVerify_FindsEachDamageToLots"},
	{"a purge takes the units of a lot with its moves", "_purge_lots", "update metered.lot_rows r set last_seq = stays.last_seq, rest = stays.rest, drawn = stays.drawn, held = stays.held, kept = stays.kept where r.no = stays.no;", "null;", "./wallet", "TestPurge_ChangesNoBalance"},
	{"a refund goes to another lot", "_refund_parts", "y.kind in ('t', 'u') and y.amount > y.back order by y.nth desc", "y.kind in ('t', 'u') and y.amount > y.back order by y.nth", "./wallet", "TestWallets_AgreeWithTheModel"},
	{"a refund to an ended lot lasts", "_give_back", "if l.expires_at > refund.at then", "if true then", "./wallet", "TestRefund_ToALotThatHasEndedFollowsItsPolicy"},
	{"a refund forgets the end of its lot", "refund", "e.lots_end := least(e.lots_end, fate.ends);", "", "./wallet", "TestLot_EndsAtItsTimeThoughARefundBroughtItsUnitsBack"},
	{"a refund of overdraft makes credit", "_refund_parts", "bare := bare + case when lot = 0 then units else 0 end;", "", "./wallet", "TestRefund_OfOverdraftMakesNoCreditThatNeverEnds"},
	{"a capture forgets the priority of lots", "_capture_lots", "order by l.priority, l.expires_at, l.age", "order by l.expires_at, l.age", "./wallet", "TestCapture_FollowsPriorityBeforeTheEndOfLots"},
	{"a grant leaves the overdraft", "_add_lot", "if debt > 0 and plan.uses is null then", "if false then", "./wallet", "TestOverdraft_IsPaidBackByTheNextGrant"},
	{"a grant's reference grants twice", "plan_lot", "case when was.fingerprint = lot.fingerprint then 'same' else 'conflict' end", "'same'", "./wallet", "TestGrant_OfAReferenceIsMadeOnce"},
	{"a revocation leaves units of due holds", "_name_lot", "entry := metered._after_due(entry, 0, wait_ms);", "", "./wallet", "TestRevoke_TakesUnitsThatADueHoldFreed"},
	{"a rollover takes all units", "_rolls", "least(l.rest + l.kept, l.roll_cap)", "l.rest + l.kept", "./wallet", "TestWallets_AgreeWithTheModel"},
	{"a lot pays for another use", "_apply_lots", "and y.expires_at > e.at and (y.plan).uses @> array[use]", "and y.expires_at > e.at", "./wallet", "TestUses_ADrawTakesLotsForItsUseInTheOrderOfAllLots"},
	{"a refusal keeps units applied", "_write_for_uses", "if posted.refused is not null then\n            raise exception using errcode = 'MT100';", "if false then\n            null;", "./wallet", "TestUses_ADrawTakesLotsForItsUseInTheOrderOfAllLots"},
	{"freed units of a use are for all", "_free_lots", "elsif (l.plan).uses is not null then", "elsif false then", "./wallet", "TestUses_AHoldGivesUnitsBackToTheirUse"},
	{"refunded units of a use are for all", "_give_back", "if (l.plan).uses is not null then", "if false then", "./wallet", "TestUses_ARefundGoesBackToTheLotsThatPaid"},
	{"an overdrawn wallet draws no lot for a use", "_use_lots", "_take_lots(of_scope, at_seq, units,", "_take_lots(of_scope, at_seq, covered,", "./wallet", "TestUses_OverdraftIsUsedWhenNoLotForTheUseIsLeft"},
	{"a call ends all lots for a use", "_settle", "kept_left := max_lots;", "null;", "./wallet", "TestUses_AnEndedLotPaysNothingSweptOrNot"},
	{"a call that writes nothing forgets a debt", "_settle", "if e.seq > tip.seq then", "if true then", "./wallet", "TestOverdraft_OutlivesCallsThatWriteNothing"},
	{"a due hold frees units of a use for all", "_due_lots", "case when (child.plan).uses is not null then held.back else 0 end", "0", "./wallet", "TestUses_AHoldGivesUnitsBackToTheirUse"},
	{"a due hold gives to a lot that has ended", "_free_lots", "if l.expires_at <= freed.at then", "if false then", "./wallet", "TestReservation_FreedUnitsOfAnEndedLotLapseAtOnce"},

	// What time does to a wallet: holds fall due, with minima, and lots begin, end, roll over and renew.
	{"a name is looked up before what is due", "_name_lot", "entry := metered._after_due(entry, 0, wait_ms);\n    lot := metered._find_lot(e.scope, of_lot, of_reference);",
		"lot := metered._find_lot(e.scope, of_lot, of_reference);\n    entry := metered._after_due(entry, 0, wait_ms);", "./wallet", twins},
	{"a balance lists lots by number", "wallet_balance", "order by x.priority, x.expires_at, x.age)", "order by x.priority, x.expires_at, x.no)", "./wallet", twins},
	{"a reader counts the ends that one call writes", "_lapsing", "if few.n <= metered._ends_per_call() then", "if true then", "./wallet", twins},
	{"a call on a lot leaves its end unwritten", "_end_named", "exit when l.no is null;", "exit when true;", "./wallet", twins},
	{"a reader captures no minimum", "_due_lots", "units := minima[next_hold];", "units := 0;", "./wallet", twins},
	{"a reader gives units of a due hold to no lot", "_due_lots", "lots[lot_pos].rest := lots[lot_pos].rest + held.amount - part;", "null;", "./wallet", twins},
	{"a writer captures no minimum", "_end_line", "least(l.open, greatest(0, l.at_least - l.captured))", "0", "./wallet", twins},
	{"a due hold comes before an end of the same instant", "_due_lots", "filter (where o.expires_at > greatest(o.due, tip.at))", "filter (where o.expires_at >= greatest(o.due, tip.at))", "./wallet", twins},
	{"a reader renews once", "_due_lots", "if ((child.plan).renews).every is not null and", "if false and", "./wallet", twins},
	{"a reader rolls over once", "_gone_on", "if (l.plan).roll_again <> 0 then", "if false then", "./wallet", twins},
	{"what went on is as old as its rollover", "_append_lot", "metered._age(of_lot, entry.at, entry.seq)", "metered._age(null, entry.at, entry.seq)", "./wallet", twins},

	// COMMIT, and attempts.
	{"COMMIT's tag is not read", "internal/command/owned.go", `case err == nil && tag == "COMMIT":`, `case err == nil:`, "./internal/command", "TestDo_ACommitAnsweredByRollbackIsNoSuccess"},
	{"SafeToRetry is trusted", "internal/commit/commit.go", "return done && pgconn.Timeout(err) && pgconn.SafeToRetry(err)", "return pgconn.SafeToRetry(err) || done && pgconn.Timeout(err)", "./internal/commit", "TestCalls_CutAtEachMessageNeverContradictTheDatabase"},
	{"an ERROR of a pooler is definite", "internal/commit/commit.go", "case sqlstate.ConnectionException, sqlstate.SystemError, sqlstate.InternalError, \"\":\n\t\treturn true", "case \"\":\n\t\treturn true", "./internal/commit", "TestOutcome_IsTheSameForEachCallThatCommits"},
	{"an unknown outcome is not resolved", "internal/command/engine.go", "case a.unknown:\n\t\t\tlost = a.err", "case false:\n\t\t\tlost = a.err", "./internal/command", "TestDo_AnUnknownOutcomeIsResolved"},
	{"losers take no turns", "internal/command/engine.go", "if turn == nil {", "if turn = func() {}; false {", "./internal/command", "TestCollisions_EachLoserGetsItsTurn"},
	{"a connection that ended in the pool is an error", "internal/command/engine.go", "case a.ended && ended < e.pool.Stat().MaxConns():", "case a.ended && ended < 0:", ".", "TestConnectionsThatEndedInThePoolAreNoErrorOfTheNextCall"},
}
