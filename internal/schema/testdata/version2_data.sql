-- What the build of version 2 left in a database, to 11:45 of 2026-03-01: what that of version 1 had left, upgraded, and
-- declared scopes, thresholds, leases, children, wallets and sessions.

truncate metered.schema_version, metered.holds_horizon, metered.operations_horizon;

INSERT INTO metered.hold_events (hold, at, deadline, version, kind, entity, detail, note, namespace, operation) VALUES
	(2, '2026-03-01 11:30:00+00', '2026-03-01 11:31:00+00', 1, 'h', NULL, '{"lines": [{"open": 1, "scope": "room/1", "amount": 1, "captured": 0}], "holder": "bob", "tenant": "acme", "lifetime_us": 86400000000}', '{"actor": "ann"}', NULL, NULL),
	(2, '2026-03-01 11:32:00+00', NULL, 2, 'x', NULL, NULL, '{"actor": "system"}', NULL, NULL),
	(3, '2026-03-01 11:32:00+00', '2026-03-01 12:32:00+00', 1, 'h', NULL, '{"lines": [{"open": 2, "scope": "room/1", "amount": 2, "captured": 0}, {"open": 3, "scope": "room/2", "amount": 3, "captured": 0}], "holder": "ann", "tenant": "acme", "lifetime_us": 86400000000}', '{"actor": "ann"}', NULL, NULL),
	(4, '2026-03-01 11:32:00+00', '2026-03-01 11:37:00+00', 1, 'h', NULL, '{"lines": [{"open": 4, "scope": "room/1", "amount": 4, "captured": 0}], "holder": "bob", "tenant": "acme", "lifetime_us": 86400000000}', '{"actor": "ann"}', NULL, NULL),
	(5, '2026-03-01 11:32:00+00', '2026-03-01 12:32:00+00', 1, 'h', NULL, '{"lines": [{"open": 5, "scope": "room/1", "amount": 5, "captured": 0}], "holder": "ann", "tenant": "acme", "lifetime_us": 86400000000}', '{"actor": "ann"}', NULL, NULL),
	(6, '2026-03-01 11:32:00+00', '2026-03-01 12:32:00+00', 1, 'h', NULL, '{"lines": [{"open": 6, "scope": "room/1", "amount": 6, "captured": 0}], "holder": "ann", "tenant": "acme", "lifetime_us": 86400000000}', '{"actor": "ann"}', NULL, NULL),
	(7, '2026-03-01 11:32:00+00', '2026-03-01 12:32:00+00', 1, 'h', NULL, '{"lines": [{"open": 7, "scope": "room/1", "amount": 7, "captured": 0}], "holder": "ann", "tenant": "acme", "lifetime_us": 86400000000}', '{"actor": "ann"}', NULL, NULL),
	(8, '2026-03-01 11:32:00+00', '2026-03-01 12:32:00+00', 1, 'h', NULL, '{"lines": [{"open": 8, "scope": "room/1", "amount": 8, "captured": 0}], "holder": "ann", "tenant": "acme", "lifetime_us": 86400000000}', '{"actor": "ann"}', NULL, NULL),
	(5, '2026-03-01 11:32:00+00', NULL, 2, 'c', 'order/1', '[{"at": "2026-03-01T11:32:00+00:00", "seq": 9, "scope": "room/1", "amount": 5}]', NULL, NULL, NULL),
	(6, '2026-03-01 11:32:00+00', NULL, 2, 'p', NULL, '[{"at": "2026-03-01T11:32:00+00:00", "seq": 10, "scope": "room/1", "amount": 2}]', NULL, NULL, NULL),
	(7, '2026-03-01 11:32:00+00', NULL, 2, 'r', NULL, NULL, NULL, NULL, NULL),
	(8, '2026-03-01 11:32:00+00', NULL, 2, 'c', NULL, '[{"at": "2026-03-01T11:32:00+00:00", "seq": 12, "scope": "room/1", "amount": 8}]', NULL, NULL, NULL),
	(8, '2026-03-01 11:32:00+00', NULL, 3, 'b', NULL, NULL, NULL, NULL, NULL),
	(3, '2026-03-01 11:32:00+00', '2026-03-01 12:33:00+00', 2, 'e', NULL, NULL, NULL, NULL, NULL),
	(9, '2026-03-01 11:32:00+00', '2026-03-01 12:32:00+00', 1, 'h', NULL, '{"claim": "claim/name%2Fann%2Facme", "lines": [{"open": 1, "scope": "claim/name%2Fann%2Facme", "amount": 1, "captured": 0}], "holder": "ann", "tenant": "acme", "lifetime_us": 86400000000}', NULL, NULL, NULL),
	(10, '2026-03-01 11:32:00+00', '2026-03-01 12:32:00+00', 1, 'h', NULL, '{"claim": "claim/name%2Fbob%2Facme", "lines": [{"open": 1, "scope": "claim/name%2Fbob%2Facme", "amount": 1, "captured": 0}], "holder": "bob", "tenant": "acme", "lifetime_us": 86400000000}', NULL, NULL, NULL),
	(10, '2026-03-01 11:32:00+00', NULL, 2, 'c', 'user/bob', '[{"at": "2026-03-01T11:32:00+00:00", "seq": 2, "scope": "claim/name%2Fbob%2Facme", "amount": 1}]', NULL, NULL, NULL),
	(11, '2026-03-01 11:32:00+00', '2026-03-01 12:32:00+00', 1, 'h', NULL, '{"lines": [{"open": 1, "scope": "room/2", "amount": 1, "captured": 0}], "tenant": "acme", "lifetime_us": 86400000000}', NULL, 'acme', 'plain'),
	(6, '2026-03-01 11:32:00+00', NULL, 3, 'p', NULL, '[{"at": "2026-03-01T11:32:00+00:00", "seq": 14, "scope": "room/1", "amount": 1}]', NULL, 'acme', 'plain'),
	(12, '2026-03-01 11:32:00+00', '2026-03-01 12:32:00+00', 1, 'h', NULL, '{"lines": [{"open": 1, "scope": "room/2", "amount": 1, "captured": 0}], "tenant": "acme", "lifetime_us": 86400000000}', NULL, 'acme', '019ca92b-6780-7003-8000-000000000003'),
	(6, '2026-03-01 11:32:00+00', NULL, 4, 'p', NULL, '[{"at": "2026-03-01T11:32:00+00:00", "seq": 15, "scope": "room/1", "amount": 1}]', NULL, 'acme', '019ca92b-6780-7003-8000-000000000003'),
	(13, '2026-03-01 11:40:00+00', '2026-03-01 12:40:00+00', 1, 'h', NULL, '{"claim": "", "lines": [{"open": 25, "scope": "wallet/ann", "amount": 25, "captured": 0}], "holder": "", "tenant": "acme", "grace_us": 0, "lifetime_us": 86400000000}', NULL, NULL, NULL),
	(14, '2026-03-01 11:40:00+00', '2026-03-01 12:40:00+00', 1, 'h', NULL, '{"claim": "", "lines": [{"open": 5, "scope": "wallet/bob", "amount": 5, "captured": 0}], "holder": "", "tenant": "acme", "grace_us": 0, "lifetime_us": 86400000000}', NULL, NULL, NULL),
	(15, '2026-03-01 11:40:00+00', '2026-03-01 12:40:00+00', 1, 'h', NULL, '{"claim": "", "lines": [{"open": 20, "scope": "wallet/ann", "amount": 20, "at_least": 7, "captured": 0}], "holder": "", "tenant": "acme", "grace_us": 60000000, "lifetime_us": 86400000000}', NULL, 'acme', 'session open'),
	(16, '2026-03-01 11:40:00+00', '2026-03-01 11:48:00+00', 1, 'h', NULL, '{"claim": "", "lines": [{"open": 20, "scope": "wallet/ann", "amount": 20, "at_least": 7, "captured": 0}], "holder": "", "tenant": "acme", "grace_us": 60000000, "lifetime_us": 86400000000}', NULL, 'acme', 'session dead');

INSERT INTO metered.hold_lines (hold, key, amount, captured, open, due, scope, refunded, opened_seq, at_least) VALUES
	(2, 1117629119392858811, 1, 0, 0, '2026-03-01 11:31:00+00', 'room/1', 0, NULL, 0),
	(4, 1117629119392858811, 4, 0, 4, '2026-03-01 11:37:00+00', 'room/1', 0, NULL, 0),
	(5, 1117629119392858811, 5, 5, 0, '2026-03-01 12:32:00+00', 'room/1', 0, NULL, 0),
	(7, 1117629119392858811, 7, 0, 0, '2026-03-01 12:32:00+00', 'room/1', 0, NULL, 0),
	(3, 1117629119392858811, 2, 0, 2, '2026-03-01 12:33:00+00', 'room/1', 0, NULL, 0),
	(3, 1944408291260500733, 3, 0, 3, '2026-03-01 12:33:00+00', 'room/2', 0, NULL, 0),
	(9, 5259418210039235506, 1, 0, 1, '2026-03-01 12:32:00+00', 'claim/name%2Fann%2Facme', 0, NULL, 0),
	(10, 6604402526962076084, 1, 1, 0, '2026-03-01 12:32:00+00', 'claim/name%2Fbob%2Facme', 0, NULL, 0),
	(11, 1944408291260500733, 1, 0, 1, '2026-03-01 12:32:00+00', 'room/2', 0, NULL, 0),
	(12, 1944408291260500733, 1, 0, 1, '2026-03-01 12:32:00+00', 'room/2', 0, NULL, 0),
	(6, 1117629119392858811, 6, 4, 2, '2026-03-01 12:32:00+00', 'room/1', 0, NULL, 0),
	(8, 1117629119392858811, 8, 8, 0, '2026-03-01 12:32:00+00', 'room/1', 8, NULL, 0),
	(13, 8772857003449830464, 25, 0, 25, '2026-03-01 12:40:00+00', 'wallet/ann', 0, 6, 0),
	(14, 8797032717053035658, 5, 0, 5, '2026-03-01 12:40:00+00', 'wallet/bob', 0, 3, 0),
	(15, 8772857003449830464, 20, 0, 20, '2026-03-01 12:41:00+00', 'wallet/ann', 0, 9, 7),
	(16, 8772857003449830464, 20, 0, 20, '2026-03-01 11:49:00+00', 'wallet/ann', 0, 10, 7);

INSERT INTO metered.holds (no, placed_at, deadline, due, ceiling, ended_at, issued_at, version, state, returned, pending, tenant, id, holder, claim, entity, fingerprint, keys, metadata) OVERRIDING SYSTEM VALUE VALUES
	(2, '2026-03-01 11:30:00+00', '2026-03-01 11:31:00+00', '2026-03-01 11:31:00+00', '2026-03-02 11:30:00+00', '2026-03-01 11:31:00+00', NULL, 2, 'x', false, false, 'acme', 'swept', 'bob', NULL, NULL, '\x0114d942b0a5638b8d88f648ee1f00cea8888fe6918b61dffbfd0da6f9daf934bb', '{1117629119392858811}', '{"id":"swept"}'),
	(4, '2026-03-01 11:32:00+00', '2026-03-01 11:37:00+00', '2026-03-01 11:37:00+00', '2026-03-02 11:32:00+00', NULL, NULL, 1, 'h', false, true, 'acme', 'due', 'bob', NULL, NULL, '\x015d30fb399d4efc8f12d84c4b6d7d21d764faaea004e404bd7a9e2c9fbb349fb0', '{1117629119392858811}', '{"id":"due"}'),
	(5, '2026-03-01 11:32:00+00', '2026-03-01 12:32:00+00', '2026-03-01 12:32:00+00', '2026-03-02 11:32:00+00', '2026-03-01 11:32:00+00', NULL, 2, 'c', false, false, 'acme', 'captured', 'ann', NULL, 'order/1', '\x01f717f095992ffed8974ff9adac42f3564e08461d0e0abfef601209c4ecec927d', '{1117629119392858811}', '{"id":"captured"}'),
	(7, '2026-03-01 11:32:00+00', '2026-03-01 12:32:00+00', '2026-03-01 12:32:00+00', '2026-03-02 11:32:00+00', '2026-03-01 11:32:00+00', NULL, 2, 'r', false, false, 'acme', 'released', 'ann', NULL, NULL, '\x0184434e16b0ee53ffb1b07b8f3143200200ec20f0d57ad75e5c1fc06209609868', '{1117629119392858811}', '{"id":"released"}'),
	(8, '2026-03-01 11:32:00+00', '2026-03-01 12:32:00+00', '2026-03-01 12:32:00+00', '2026-03-02 11:32:00+00', '2026-03-01 11:32:00+00', NULL, 3, 'c', true, false, 'acme', 'refunded', 'ann', NULL, NULL, '\x0132ff7c796ab6f91f261a6589ac857e4435129dc4450f68b874c6984a8a1ac33c', '{1117629119392858811}', '{"id":"refunded"}'),
	(3, '2026-03-01 11:32:00+00', '2026-03-01 12:33:00+00', '2026-03-01 12:33:00+00', '2026-03-02 11:32:00+00', NULL, NULL, 2, 'h', false, true, 'acme', 'open', 'ann', NULL, NULL, '\x0130c4a55eda85494cd69836efd458e08a5667f92eca0bb4e9027255392398ebbc', '{1117629119392858811,1944408291260500733}', '{"id":"open"}'),
	(9, '2026-03-01 11:32:00+00', '2026-03-01 12:32:00+00', '2026-03-01 12:32:00+00', '2026-03-02 11:32:00+00', NULL, '2026-11-22 16:46:36.188+00', 1, 'h', false, true, 'acme', 'claim_6d7bd9279bd7d6c79d0fbbafdfa35e45_01a20427-069c-74ab-8278-e1e81a481a0b', 'ann', 'claim/name%2Fann%2Facme', NULL, '\x01ba8a87342f9a9a2efa727279193402d0f6dc13ae74757c9ae3e1edf90a75d68f', '{5259418210039235506}', NULL),
	(10, '2026-03-01 11:32:00+00', '2026-03-01 12:32:00+00', '2026-03-01 12:32:00+00', '2026-03-02 11:32:00+00', '2026-03-01 11:32:00+00', '2026-11-22 16:46:36.189+00', 2, 'c', false, false, 'acme', 'claim_3635c4c61d9bfe212dd6e4bb88e4939a_01a20427-069d-75d6-b73a-21d020f2caaa', 'bob', 'claim/name%2Fbob%2Facme', 'user/bob', '\x01bf435b3131eb622fa66d125d4a278063c118c325f7e1e1c2a34550297ec3ec58', '{6604402526962076084}', NULL),
	(11, '2026-03-01 11:32:00+00', '2026-03-01 12:32:00+00', '2026-03-01 12:32:00+00', '2026-03-02 11:32:00+00', NULL, NULL, 1, 'h', false, true, 'acme', 'of plain', '', NULL, NULL, '\x013d2efb2b04bcaecdc7d202797e7bc6add5af4a6e5c7dd6e6d026214cccebc26c', '{1944408291260500733}', NULL),
	(12, '2026-03-01 11:32:00+00', '2026-03-01 12:32:00+00', '2026-03-01 12:32:00+00', '2026-03-02 11:32:00+00', NULL, NULL, 1, 'h', false, true, 'acme', 'of 019ca92b-6780-7003-8000-000000000003', '', NULL, NULL, '\x013d2efb2b04bcaecdc7d202797e7bc6add5af4a6e5c7dd6e6d026214cccebc26c', '{1944408291260500733}', NULL),
	(6, '2026-03-01 11:32:00+00', '2026-03-01 12:32:00+00', '2026-03-01 12:32:00+00', '2026-03-02 11:32:00+00', NULL, NULL, 4, 'h', false, true, 'acme', 'partly', 'ann', NULL, NULL, '\x014259a26016d63f86e16f667f884cb184120183b65fcb9a7c5c2c7f037bd0818f', '{1117629119392858811}', '{"id":"partly"}'),
	(13, '2026-03-01 11:40:00+00', '2026-03-01 12:40:00+00', '2026-03-01 12:40:00+00', '2026-03-02 11:40:00+00', NULL, NULL, 1, 'h', false, true, 'acme', 'of lots', '', NULL, NULL, '\x01cf2fe3ad49c6a0ce2da8bbb9f44e5f2a6c0ff1f0eb8fec35bbf3e235100608d9', '{8772857003449830464}', NULL),
	(14, '2026-03-01 11:40:00+00', '2026-03-01 12:40:00+00', '2026-03-01 12:40:00+00', '2026-03-02 11:40:00+00', NULL, NULL, 1, 'h', false, true, 'acme', 'overdrawn', '', NULL, NULL, '\x01641ff616ef46f64f8522c2bc770a14e1e4f4c83b20ea2e7d0e099900da96d2ad', '{8797032717053035658}', NULL),
	(15, '2026-03-01 11:40:00+00', '2026-03-01 12:40:00+00', '2026-03-01 12:41:00+00', '2026-03-02 11:40:00+00', NULL, '2026-11-23 12:09:13.957+00', 1, 'h', false, true, 'acme', 'session_63035716106aad1e88512812d54a5ec0_01a2084f-71e5-7bce-9f94-e3b6663080e9', '', NULL, NULL, '\x010863dd2259f49b8c349bfeb7549daad801e754b2932e6fe7eb88edfcb155cd76', '{8772857003449830464}', NULL),
	(16, '2026-03-01 11:40:00+00', '2026-03-01 11:48:00+00', '2026-03-01 11:49:00+00', '2026-03-02 11:40:00+00', NULL, '2026-11-23 12:09:14.119+00', 1, 'h', false, true, 'acme', 'session_5897ebfb97d695b98518e96ddcd637cc_01a2084f-7287-7dd6-922c-af8c383a167f', '', NULL, NULL, '\x010863dd2259f49b8c349bfeb7549daad801e754b2932e6fe7eb88edfcb155cd76', '{8772857003449830464}', NULL);

INSERT INTO metered.holds_horizon (at, one) VALUES
	('2026-01-20 12:00:00+00', true);

INSERT INTO metered.job_keys (job_id, created_at, queue, key, kind, tenant, digest) VALUES
	(2, '2026-03-01 11:32:00+00', 'default', 'kept', 'process', 'acme', '\x018eda7175d69ad90375adc04ab45bade78f41331db6a31f54e5e481a10f6a558c'),
	(3, '2026-03-01 11:32:00+00', 'default', 'of plain', 'process', '', '\x011ff742418e83bbbd475a800fe6b0b9f5eaee62d7dd1d8d560a4acb9d2b4c0081'),
	(4, '2026-03-01 11:32:00+00', 'default', 'of 019ca92b-6780-7003-8000-000000000003', 'process', '', '\x012bd48aa3d555c7110d20e7fef97c7a55800f6934fb486654a5608e92ec9585d4');

INSERT INTO metered.lease_spends (lease, at_offset, amount, at, namespace, operation, note) VALUES
	(1, 0, 3, '2026-03-01 11:40:00+00', NULL, NULL, NULL),
	(1, 3, 4, '2026-03-01 11:40:00+00', NULL, NULL, NULL),
	(2, 0, 5, '2026-03-01 11:40:00+00', NULL, NULL, NULL),
	(4, 0, 6, '2026-03-01 11:40:00+00', NULL, NULL, NULL);

INSERT INTO metered.leases (no, opened_at, ends_at, settled_at, granted, spent, fence, opened_seq, settled_seq, mode, scope, owner, settled_by, child) OVERRIDING SYSTEM VALUE VALUES
	(1, '2026-03-01 11:40:00+00', '2026-03-01 12:40:00+00', NULL, 100, NULL, 5078686084406749496, 1, NULL, 's', 'org/leased', 'gone', NULL, NULL),
	(2, '2026-03-01 11:40:00+00', '2026-03-01 11:45:00+00', NULL, 100, NULL, 8892494783903783782, 2, NULL, 's', 'org/leased', 'gone', NULL, NULL),
	(3, '2026-03-01 11:40:00+00', '2026-03-01 11:45:00+00', NULL, 100, NULL, 2787540422752595321, 3, NULL, 'm', 'org/leased', 'gone', NULL, NULL),
	(4, '2026-03-01 11:40:00+00', '2026-03-01 11:45:00+00', '2026-03-01 11:40:00+00', 100, 6, 5238359988555629798, 1, 3, 's', 'org/settled', 'gone', 'gone', NULL),
	(5, '2026-03-01 11:40:00+00', '2026-03-01 12:40:00+00', NULL, 50, NULL, -6548398842003909832, 1, NULL, 'c', 'user/ann', 'vm/18889/0dbc2acf33d2', NULL, 'run/open'),
	(6, '2026-03-01 11:40:00+00', '2026-03-01 12:40:00+00', '2026-03-01 11:40:00+00', 50, 8, 8882229580991105433, 2, 4, 'c', 'user/ann', 'vm/18889/0dbc2acf33d2', 'vm/18889/0dbc2acf33d2', 'run/closed');

INSERT INTO metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, ref, hold, namespace, operation, note, anchor_at, anchor_spent, lots_end, crossed) VALUES
	(33, 33, '2026-01-20 12:00:00+00', 561, 0, 0, 0, 0, 'c', 'org/old', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(34, 34, '2026-01-20 12:00:00+00', 595, 0, 0, 0, 0, 'c', 'org/old', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(35, 35, '2026-01-20 12:00:00+00', 630, 0, 0, 0, 0, 'c', 'org/old', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(36, 36, '2026-01-20 12:00:00+00', 666, 0, 0, 0, 0, 'c', 'org/old', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(37, 37, '2026-01-20 12:00:00+00', 703, 0, 0, 0, 0, 'c', 'org/old', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(38, 38, '2026-01-20 12:00:00+00', 741, 0, 0, 0, 0, 'c', 'org/old', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(39, 39, '2026-01-20 12:00:00+00', 780, 0, 0, 0, 0, 'c', 'org/old', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(40, 40, '2026-01-20 12:00:00+00', 820, 0, 0, 0, 0, 'c', 'org/old', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(41, 1, '2026-01-20 12:00:00+00', 820, 1, 0, 0, 0, 'r', 'org/old', NULL, 2, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(1, 1, '2026-01-20 12:00:00+00', 0, 0, 0, 1, 0, 'h', 'room/old', '2026-01-20 12:01:00+00', NULL, '019bdb46-aa00-7001-8000-000000000001', NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(2, 1, '2026-01-20 12:00:00+00', 0, 0, 0, 0, 0, 'l', 'room/old', NULL, NULL, '019bdb46-aa00-7001-8000-000000000001', NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(1, 1, '2026-01-20 12:00:00+00', 1, 0, 0, 0, 0, 'c', 'org/old', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(1, 3, '2026-03-01 13:00:00+00', 3, 0, 0, 0, 0, 'c', 'org/clock', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(2, 0, '2026-03-01 10:00:00+00', 3, 0, 0, 0, 1, 'k', 'org/clock', NULL, NULL, NULL, NULL, NULL, '{"actor": "ops"}', NULL, NULL, NULL, NULL),
	(1, 1, '2026-03-01 10:01:00+00', 1, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "0"}', NULL, NULL, NULL, NULL),
	(2, 2, '2026-03-01 10:02:00+00', 3, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "1"}', NULL, NULL, NULL, NULL),
	(3, 3, '2026-03-01 10:03:00+00', 6, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "2"}', NULL, NULL, NULL, NULL),
	(4, 4, '2026-03-01 10:04:00+00', 10, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "3"}', NULL, NULL, NULL, NULL),
	(5, 5, '2026-03-01 10:05:00+00', 15, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "4"}', NULL, NULL, NULL, NULL),
	(6, 6, '2026-03-01 10:06:00+00', 21, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "5"}', NULL, NULL, NULL, NULL),
	(7, 7, '2026-03-01 10:07:00+00', 28, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "6"}', NULL, NULL, NULL, NULL),
	(8, 8, '2026-03-01 10:08:00+00', 36, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "7"}', NULL, NULL, NULL, NULL),
	(9, 9, '2026-03-01 10:09:00+00', 45, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "8"}', NULL, NULL, NULL, NULL),
	(10, 10, '2026-03-01 10:10:00+00', 55, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "9"}', NULL, NULL, NULL, NULL),
	(11, 11, '2026-03-01 10:11:00+00', 66, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "10"}', NULL, NULL, NULL, NULL),
	(12, 12, '2026-03-01 10:12:00+00', 78, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "11"}', NULL, NULL, NULL, NULL),
	(13, 13, '2026-03-01 10:13:00+00', 91, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "12"}', NULL, NULL, NULL, NULL),
	(14, 14, '2026-03-01 10:14:00+00', 105, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "13"}', NULL, NULL, NULL, NULL),
	(15, 15, '2026-03-01 10:15:00+00', 120, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "14"}', NULL, NULL, NULL, NULL),
	(16, 16, '2026-03-01 10:16:00+00', 136, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "15"}', NULL, NULL, NULL, NULL),
	(17, 17, '2026-03-01 10:17:00+00', 153, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "16"}', NULL, NULL, NULL, NULL),
	(18, 18, '2026-03-01 10:18:00+00', 171, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "17"}', NULL, NULL, NULL, NULL),
	(19, 19, '2026-03-01 10:19:00+00', 190, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "18"}', NULL, NULL, NULL, NULL),
	(20, 20, '2026-03-01 10:20:00+00', 210, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "19"}', NULL, NULL, NULL, NULL),
	(21, 21, '2026-03-01 10:21:00+00', 231, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "20"}', NULL, NULL, NULL, NULL),
	(22, 22, '2026-03-01 10:22:00+00', 253, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "21"}', NULL, NULL, NULL, NULL),
	(23, 23, '2026-03-01 10:23:00+00', 276, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "22"}', NULL, NULL, NULL, NULL),
	(24, 24, '2026-03-01 10:24:00+00', 300, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "23"}', NULL, NULL, NULL, NULL),
	(25, 25, '2026-03-01 10:25:00+00', 325, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "24"}', NULL, NULL, NULL, NULL),
	(26, 26, '2026-03-01 10:26:00+00', 351, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "25"}', NULL, NULL, NULL, NULL),
	(27, 27, '2026-03-01 10:27:00+00', 378, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "26"}', NULL, NULL, NULL, NULL),
	(28, 28, '2026-03-01 10:28:00+00', 406, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "27"}', NULL, NULL, NULL, NULL),
	(29, 29, '2026-03-01 10:29:00+00', 435, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "28"}', NULL, NULL, NULL, NULL),
	(30, 30, '2026-03-01 10:30:00+00', 465, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "29"}', NULL, NULL, NULL, NULL),
	(31, 31, '2026-03-01 10:31:00+00', 496, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "30"}', NULL, NULL, NULL, NULL),
	(32, 32, '2026-03-01 10:32:00+00', 528, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "31"}', NULL, NULL, NULL, NULL),
	(33, 33, '2026-03-01 10:33:00+00', 561, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "32"}', NULL, NULL, NULL, NULL),
	(34, 34, '2026-03-01 10:34:00+00', 595, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "33"}', NULL, NULL, NULL, NULL),
	(35, 35, '2026-03-01 10:35:00+00', 630, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "34"}', NULL, NULL, NULL, NULL),
	(36, 36, '2026-03-01 10:36:00+00', 666, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "35"}', NULL, NULL, NULL, NULL),
	(37, 37, '2026-03-01 10:37:00+00', 703, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "36"}', NULL, NULL, NULL, NULL),
	(38, 38, '2026-03-01 10:38:00+00', 741, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "37"}', NULL, NULL, NULL, NULL),
	(39, 39, '2026-03-01 10:39:00+00', 780, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "38"}', NULL, NULL, NULL, NULL),
	(40, 40, '2026-03-01 10:40:00+00', 820, 0, 0, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, NULL, NULL, '{"actor": "ann", "correlation": "39"}', NULL, NULL, NULL, NULL),
	(41, 100, '2026-03-01 10:40:00+00', 820, 0, 100, 0, 0, 'd', 'org/acme', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(42, 3, '2026-03-01 10:40:00+00', 820, 3, 100, 0, 0, 'r', 'org/acme', NULL, 3, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(43, 10, '2026-03-01 10:40:00+00', 820, 13, 100, 0, 0, 'r', 'org/acme', NULL, 30, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(1, 1, '2026-03-01 11:30:00+00', 0, 0, 0, 1, 0, 'h', 'room/1', '2026-03-01 11:31:00+00', NULL, 'swept', NULL, NULL, '{"actor": "ann"}', NULL, NULL, NULL, NULL),
	(2, 1, '2026-03-01 11:32:00+00', 0, 0, 0, 0, 0, 'x', 'room/1', NULL, NULL, NULL, NULL, NULL, '{"actor": "system"}', NULL, NULL, NULL, NULL),
	(3, 2, '2026-03-01 11:32:00+00', 0, 0, 0, 2, 0, 'h', 'room/1', '2026-03-01 12:32:00+00', NULL, 'open', NULL, NULL, '{"actor": "ann"}', NULL, NULL, NULL, NULL),
	(1, 3, '2026-03-01 11:32:00+00', 0, 0, 0, 3, 0, 'h', 'room/2', '2026-03-01 12:32:00+00', NULL, 'open', NULL, NULL, '{"actor": "ann"}', NULL, NULL, NULL, NULL),
	(4, 4, '2026-03-01 11:32:00+00', 0, 0, 0, 6, 0, 'h', 'room/1', '2026-03-01 11:37:00+00', NULL, 'due', NULL, NULL, '{"actor": "ann"}', NULL, NULL, NULL, NULL),
	(5, 5, '2026-03-01 11:32:00+00', 0, 0, 0, 11, 0, 'h', 'room/1', '2026-03-01 11:37:00+00', NULL, 'captured', NULL, NULL, '{"actor": "ann"}', NULL, NULL, NULL, NULL),
	(6, 6, '2026-03-01 11:32:00+00', 0, 0, 0, 17, 0, 'h', 'room/1', '2026-03-01 11:37:00+00', NULL, 'partly', NULL, NULL, '{"actor": "ann"}', NULL, NULL, NULL, NULL),
	(7, 7, '2026-03-01 11:32:00+00', 0, 0, 0, 24, 0, 'h', 'room/1', '2026-03-01 11:37:00+00', NULL, 'released', NULL, NULL, '{"actor": "ann"}', NULL, NULL, NULL, NULL),
	(8, 8, '2026-03-01 11:32:00+00', 0, 0, 0, 32, 0, 'h', 'room/1', '2026-03-01 11:37:00+00', NULL, 'refunded', NULL, NULL, '{"actor": "ann"}', NULL, NULL, NULL, NULL),
	(9, 5, '2026-03-01 11:32:00+00', 5, 0, 0, 27, 0, 'u', 'room/1', '2026-03-01 11:37:00+00', NULL, 'captured', NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(10, 2, '2026-03-01 11:32:00+00', 7, 0, 0, 25, 0, 'u', 'room/1', '2026-03-01 11:37:00+00', NULL, 'partly', NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(11, 7, '2026-03-01 11:32:00+00', 7, 0, 0, 18, 0, 'l', 'room/1', '2026-03-01 11:37:00+00', NULL, 'released', NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(12, 8, '2026-03-01 11:32:00+00', 15, 0, 0, 10, 0, 'u', 'room/1', '2026-03-01 11:37:00+00', NULL, 'refunded', NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(13, 8, '2026-03-01 11:32:00+00', 15, 8, 0, 10, 0, 'r', 'room/1', '2026-03-01 11:37:00+00', 12, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(1, 1, '2026-03-01 11:32:00+00', 0, 0, 0, 1, 0, 'h', 'claim/name%2Fann%2Facme', '2026-03-01 12:32:00+00', NULL, 'claim_6d7bd9279bd7d6c79d0fbbafdfa35e45_01a20427-069c-74ab-8278-e1e81a481a0b', NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(1, 1, '2026-03-01 11:32:00+00', 0, 0, 0, 1, 0, 'h', 'claim/name%2Fbob%2Facme', '2026-03-01 12:32:00+00', NULL, 'claim_3635c4c61d9bfe212dd6e4bb88e4939a_01a20427-069d-75d6-b73a-21d020f2caaa', NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(2, 1, '2026-03-01 11:32:00+00', 1, 0, 0, 0, 0, 'u', 'claim/name%2Fbob%2Facme', NULL, NULL, 'claim_3635c4c61d9bfe212dd6e4bb88e4939a_01a20427-069d-75d6-b73a-21d020f2caaa', NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(1, 1, '2026-03-01 11:32:00+00', 1, 0, 0, 0, 0, 'c', 'tries/ann', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(2, 1, '2026-03-01 11:32:00+00', 0, 0, 0, 4, 0, 'h', 'room/2', '2026-03-01 12:32:00+00', NULL, 'of plain', 'acme', 'plain', NULL, NULL, NULL, NULL, NULL),
	(14, 1, '2026-03-01 11:32:00+00', 16, 8, 0, 9, 0, 'u', 'room/1', '2026-03-01 11:37:00+00', NULL, 'partly', 'acme', 'plain', NULL, NULL, NULL, NULL, NULL),
	(44, 7, '2026-03-01 11:32:00+00', 827, 13, 100, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, 'acme', 'plain', NULL, NULL, NULL, NULL, NULL),
	(2, 1, '2026-03-01 11:32:00+00', 2, 0, 0, 0, 0, 'c', 'tries/ann', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(3, 1, '2026-03-01 11:32:00+00', 0, 0, 0, 5, 0, 'h', 'room/2', '2026-03-01 12:32:00+00', NULL, 'of 019ca92b-6780-7003-8000-000000000003', 'acme', '019ca92b-6780-7003-8000-000000000003', NULL, NULL, NULL, NULL, NULL),
	(15, 1, '2026-03-01 11:32:00+00', 17, 8, 0, 8, 0, 'u', 'room/1', '2026-03-01 11:37:00+00', NULL, 'partly', 'acme', '019ca92b-6780-7003-8000-000000000003', NULL, NULL, NULL, NULL, NULL),
	(45, 7, '2026-03-01 11:32:00+00', 834, 13, 100, 0, 0, 'c', 'org/acme', NULL, NULL, NULL, 'acme', '019ca92b-6780-7003-8000-000000000003', NULL, NULL, NULL, NULL, NULL),
	(1, 85, '2026-03-01 11:40:00+00', 85, 0, 0, 0, 0, 'c', 'org/plan', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '{"l/lifetime/few": {"rearm": 70}, "p/month (Europe/Berlin)/80 %": {"until": "2026-03-31T22:00:00+00:00"}}'),
	(1, 100, '2026-03-01 11:40:00+00', 0, 0, 0, 100, 0, 'h', 'org/leased', '2126-02-05 11:40:00+00', NULL, 'lease/1', NULL, NULL, '{"actor": "gone"}', NULL, NULL, NULL, NULL),
	(2, 100, '2026-03-01 11:40:00+00', 0, 0, 0, 200, 0, 'h', 'org/leased', '2126-02-05 11:40:00+00', NULL, 'lease/2', NULL, NULL, '{"actor": "gone"}', NULL, NULL, NULL, NULL),
	(3, 100, '2026-03-01 11:40:00+00', 0, 0, 0, 300, 0, 'h', 'org/leased', '2126-02-05 11:40:00+00', NULL, 'lease/3', NULL, NULL, '{"actor": "gone"}', NULL, NULL, NULL, NULL),
	(1, 100, '2026-03-01 11:40:00+00', 0, 0, 0, 100, 0, 'h', 'org/settled', '2126-02-05 11:40:00+00', NULL, 'lease/4', NULL, NULL, '{"actor": "gone"}', NULL, NULL, NULL, NULL),
	(2, 6, '2026-03-01 11:40:00+00', 6, 0, 0, 94, 0, 'u', 'org/settled', '2126-02-05 11:40:10+00', NULL, 'lease/4', NULL, NULL, '{"actor": "gone"}', NULL, NULL, NULL, NULL),
	(3, 94, '2026-03-01 11:40:00+00', 6, 0, 0, 0, 0, 'l', 'org/settled', NULL, NULL, 'lease/4', NULL, NULL, '{"actor": "gone"}', NULL, NULL, NULL, NULL),
	(1, 50, '2026-03-01 11:40:00+00', 0, 0, 0, 50, 0, 'h', 'user/ann', '2126-02-05 11:40:00+00', NULL, 'lease/5', NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(1, 50, '2026-03-01 11:40:00+00', 0, 0, 50, 0, 0, 'd', 'run/open', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(2, 8, '2026-03-01 11:40:00+00', 8, 0, 50, 0, 0, 'c', 'run/open', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(2, 50, '2026-03-01 11:40:00+00', 0, 0, 0, 100, 0, 'h', 'user/ann', '2126-02-05 11:40:00+00', NULL, 'lease/6', NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(1, 50, '2026-03-01 11:40:00+00', 0, 0, 50, 0, 0, 'd', 'run/closed', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(2, 8, '2026-03-01 11:40:00+00', 8, 0, 50, 0, 0, 'c', 'run/closed', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	(3, 0, '2026-03-01 11:40:00+00', 8, 0, 50, 0, 0, 'z', 'run/closed', '-infinity', NULL, NULL, NULL, NULL, '{"actor": "vm/18889/0dbc2acf33d2"}', NULL, NULL, NULL, NULL),
	(3, 8, '2026-03-01 11:40:00+00', 8, 0, 0, 92, 0, 'u', 'user/ann', '2126-02-05 11:40:00+00', NULL, 'lease/6', NULL, NULL, '{"actor": "vm/18889/0dbc2acf33d2"}', NULL, NULL, NULL, NULL),
	(4, 42, '2026-03-01 11:40:00+00', 8, 0, 0, 50, 0, 'l', 'user/ann', '2126-02-05 11:40:00+00', NULL, 'lease/6', NULL, NULL, '{"actor": "vm/18889/0dbc2acf33d2"}', NULL, NULL, NULL, NULL),
	(1, 100, '2026-03-01 11:40:00+00', 0, 0, 100, 0, 0, 'd', 'wallet/ann', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '2026-03-01 11:50:00+00', NULL),
	(2, 40, '2026-03-01 11:40:00+00', 0, 0, 140, 0, 0, 'd', 'wallet/ann', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '2026-03-01 11:50:00+00', NULL),
	(3, 70, '2026-03-01 11:40:00+00', 0, 0, 210, 0, 0, 'd', 'wallet/ann', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '2026-03-01 11:50:00+00', NULL),
	(4, 200, '2026-03-01 11:40:00+00', 0, 0, 410, 0, 0, 'd', 'wallet/ann', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '2026-03-01 11:50:00+00', NULL),
	(5, 30, '2026-03-01 11:40:00+00', 30, 0, 410, 0, 0, 'c', 'wallet/ann', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '2026-03-01 11:50:00+00', NULL),
	(6, 25, '2026-03-01 11:40:00+00', 30, 0, 410, 25, 0, 'h', 'wallet/ann', '2026-03-01 12:40:00+00', NULL, 'of lots', NULL, NULL, NULL, NULL, NULL, '2026-03-01 11:50:00+00', NULL),
	(7, 20, '2026-03-01 11:40:00+00', 30, 0, 390, 25, 0, 'v', 'wallet/ann', '2026-03-01 12:40:00+00', NULL, NULL, NULL, NULL, NULL, NULL, NULL, '2026-03-01 11:50:00+00', NULL),
	(8, 4, '2026-03-01 11:40:00+00', 30, 4, 390, 25, 0, 'r', 'wallet/ann', '2026-03-01 12:40:00+00', 5, NULL, NULL, NULL, NULL, NULL, NULL, '2026-03-01 11:50:00+00', NULL),
	(1, 10, '2026-03-01 11:40:00+00', 0, 0, 10, 0, 0, 'd', 'wallet/bob', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'infinity', NULL),
	(2, 35, '2026-03-01 11:40:00+00', 35, 0, 10, 0, 0, 'c', 'wallet/bob', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'infinity', '{"l/credit/low": {"rearm": -16}}'),
	(3, 5, '2026-03-01 11:40:00+00', 35, 0, 10, 5, 0, 'h', 'wallet/bob', '2026-03-01 12:40:00+00', NULL, 'overdrawn', NULL, NULL, NULL, NULL, NULL, 'infinity', '{"l/credit/low": {"rearm": -16}}'),
	(9, 20, '2026-03-01 11:40:00+00', 30, 4, 390, 45, 0, 'h', 'wallet/ann', '2026-03-01 12:40:00+00', NULL, 'session_63035716106aad1e88512812d54a5ec0_01a2084f-71e5-7bce-9f94-e3b6663080e9', 'acme', 'session open', NULL, NULL, NULL, '2026-03-01 11:50:00+00', NULL),
	(10, 20, '2026-03-01 11:40:00+00', 30, 4, 390, 65, 0, 'h', 'wallet/ann', '2026-03-01 11:49:00+00', NULL, 'session_5897ebfb97d695b98518e96ddcd637cc_01a2084f-7287-7dd6-922c-af8c383a167f', 'acme', 'session dead', NULL, NULL, NULL, '2026-03-01 11:50:00+00', NULL);

INSERT INTO metered.lot_holds (seq, lot, amount, scope) VALUES
	(6, 1, 25, 'wallet/ann'),
	(3, 0, 5, 'wallet/bob'),
	(9, 1, 20, 'wallet/ann'),
	(10, 1, 20, 'wallet/ann');

INSERT INTO metered.lot_moves (seq, nth, lot, amount, back, kind, scope) VALUES
	(1, 1, 1, 100, 0, 'd', 'wallet/ann'),
	(2, 1, 2, 40, 0, 'd', 'wallet/ann'),
	(3, 1, 3, 70, 0, 'd', 'wallet/ann'),
	(4, 1, 4, 200, 0, 'd', 'wallet/ann'),
	(6, 1, 1, 25, 0, 'h', 'wallet/ann'),
	(7, 1, 3, 20, 0, 'v', 'wallet/ann'),
	(5, 1, 1, 30, 4, 't', 'wallet/ann'),
	(8, 1, 1, 4, 0, 'g', 'wallet/ann'),
	(1, 1, 5, 10, 0, 'd', 'wallet/bob'),
	(2, 1, 5, 10, 0, 't', 'wallet/bob'),
	(2, 2, 0, 25, 0, 't', 'wallet/bob'),
	(3, 1, 0, 5, 0, 'h', 'wallet/bob'),
	(9, 1, 1, 20, 0, 'h', 'wallet/ann'),
	(10, 1, 1, 20, 0, 'h', 'wallet/ann');

INSERT INTO metered.lots (no, granted_at, expires_at, granted_seq, last_seq, amount, rest, drawn, held, lapsed, revoked, rolled, untold, roll_cap, roll_for, late, from_lot, priority, origin, open, scope, category, reference, fingerprint) OVERRIDING SYSTEM VALUE VALUES
	(2, '2026-03-01 11:40:00+00', '2026-03-01 11:51:00+00', 2, 2, 40, 40, 0, 0, 0, 0, 0, 0, 30, '01:00:00', NULL, NULL, 0, 'g', true, 'wallet/ann', 'paid', 'rolling', '\x011d30eac2fb1c4f673fcd1ea50b2cda56394c26bf48ae4927fa9b4e1ef1a6158a'),
	(4, '2026-03-01 11:40:00+00', 'infinity', 4, 4, 200, 200, 0, 0, 0, 0, 0, 0, NULL, NULL, '00:00:00', NULL, 0, 'g', true, 'wallet/ann', 'paid', 'lasting', '\x012c63418c6798c405c921bc081339eec04a131d5df972d6108334a5b4b771b728'),
	(3, '2026-03-01 11:40:00+00', '2026-03-01 13:00:00+00', 3, 7, 70, 50, 0, 0, 0, 20, 0, 0, NULL, NULL, NULL, NULL, 0, 'g', true, 'wallet/ann', 'paid', 'bounced', '\x0194a20abcd00eb0a68eda0436bbbf3b2b1fc5bf41723b8760332c180a6fbf4607'),
	(5, '2026-03-01 11:40:00+00', 'infinity', 1, 2, 10, 0, 10, 0, 0, 0, 0, 0, NULL, NULL, NULL, NULL, 0, 'g', false, 'wallet/bob', 'paid', 'only', '\x016a2792c23b13199471dd135e7c622d162d7e74c6638507498268938e0d731de6'),
	(1, '2026-03-01 11:40:00+00', '2026-03-01 11:50:00+00', 1, 10, 100, 9, 26, 65, 0, 0, 0, 0, NULL, NULL, NULL, NULL, 0, 'g', true, 'wallet/ann', 'paid', 'first', '\x011ecbda1bad44d30772242602e3cc6cb26698d641166193de609e9523720260f7');

INSERT INTO metered.operations (at, issued_at, namespace, id, fingerprint, result, scopes, amounts, seqs, ats, holds, refusal, name, jobs) VALUES
	('2026-03-01 11:32:00+00', NULL, 'acme', 'plain', '\x01d69de7e91dec1f0e4d39816159f4d89bf48591e5a44220ce049b33410093bbae', '\x7b226e616d65223a22706c61696e227d', '{org/acme}', '{7}', '{44}', '{"2026-03-01 11:32:00+00"}', '{"{\"created\":true,\"tenant\" : \"acme\", \"id\" : \"of plain\", \"holder\" : \"\", \"state\" : \"h\", \"version\" : 1, \"placed_at\" : \"2026-03-01T11:32:00+00:00\", \"deadline\" : \"2026-03-01T12:32:00+00:00\", \"due\" : \"2026-03-01T12:32:00+00:00\", \"ceiling\" : \"2026-03-02T11:32:00+00:00\", \"ended_at\" : null, \"now\" : \"2026-03-01T11:32:00+00:00\", \"claim\" : null, \"entity\" : null, \"returned\" : false, \"metadata\" : null, \"lines\" : [{\"scope\" : \"room/2\", \"amount\" : 1, \"captured\" : 0, \"open\" : 1}]}","{\"tenant\" : \"acme\", \"id\" : \"partly\", \"holder\" : \"ann\", \"state\" : \"h\", \"version\" : 3, \"placed_at\" : \"2026-03-01T11:32:00+00:00\", \"deadline\" : \"2026-03-01T12:32:00+00:00\", \"due\" : \"2026-03-01T12:32:00+00:00\", \"ceiling\" : \"2026-03-02T11:32:00+00:00\", \"ended_at\" : null, \"now\" : \"2026-03-01T11:32:00+00:00\", \"claim\" : null, \"entity\" : null, \"returned\" : false, \"metadata\" : {\"id\":\"partly\"}, \"lines\" : [{\"scope\" : \"room/1\", \"amount\" : 6, \"captured\" : 3, \"open\" : 3}]}"}', NULL, NULL, NULL),
	('2026-03-01 11:32:00+00', '2026-03-01 11:32:00+00', 'acme', '019ca92b-6780-7003-8000-000000000003', '\x01f973ed9373d8dd169d343002fd17bcdcb9a75c5a8f9d0764b180d162baea32ea', '\x7b226e616d65223a2230313963613932622d363738302d373030332d383030302d303030303030303030303033227d', '{org/acme}', '{7}', '{45}', '{"2026-03-01 11:32:00+00"}', '{"{\"created\":true,\"tenant\" : \"acme\", \"id\" : \"of 019ca92b-6780-7003-8000-000000000003\", \"holder\" : \"\", \"state\" : \"h\", \"version\" : 1, \"placed_at\" : \"2026-03-01T11:32:00+00:00\", \"deadline\" : \"2026-03-01T12:32:00+00:00\", \"due\" : \"2026-03-01T12:32:00+00:00\", \"ceiling\" : \"2026-03-02T11:32:00+00:00\", \"ended_at\" : null, \"now\" : \"2026-03-01T11:32:00+00:00\", \"claim\" : null, \"entity\" : null, \"returned\" : false, \"metadata\" : null, \"lines\" : [{\"scope\" : \"room/2\", \"amount\" : 1, \"captured\" : 0, \"open\" : 1}]}","{\"tenant\" : \"acme\", \"id\" : \"partly\", \"holder\" : \"ann\", \"state\" : \"h\", \"version\" : 4, \"placed_at\" : \"2026-03-01T11:32:00+00:00\", \"deadline\" : \"2026-03-01T12:32:00+00:00\", \"due\" : \"2026-03-01T12:32:00+00:00\", \"ceiling\" : \"2026-03-02T11:32:00+00:00\", \"ended_at\" : null, \"now\" : \"2026-03-01T11:32:00+00:00\", \"claim\" : null, \"entity\" : null, \"returned\" : false, \"metadata\" : {\"id\":\"partly\"}, \"lines\" : [{\"scope\" : \"room/1\", \"amount\" : 6, \"captured\" : 4, \"open\" : 2}]}"}', NULL, NULL, NULL);

INSERT INTO metered.operations_horizon (at, one) VALUES
	('2026-01-20 12:00:00+00', true);

INSERT INTO metered.refund_sum (block, amount, level, scope) VALUES
	(3, 3, 0, 'org/acme'),
	(30, 10, 0, 'org/acme'),
	(1, 10, 1, 'org/acme'),
	(12, 8, 0, 'room/1'),
	(5, 4, 0, 'wallet/ann');

INSERT INTO metered.resources (created_at, retired_at, scope) VALUES
	('2026-03-01 11:40:00+00', NULL, 'desk/1'),
	('2026-03-01 11:40:00+00', '2026-03-01 11:40:00+00', 'desk/2');

INSERT INTO metered.schema_version (version, applied_at) VALUES
	(2, '2026-11-23 12:09:13.312158+00');

INSERT INTO metered.tokens (digest, minted_at, expires_at, ended_at, uses, used, revoked, sole, purpose, subject, payload) VALUES
	('\xbfd59d7d7e94840cb0ab51f8f12495cacc5e0bc0efc6df86d94cc23e34b4cb39', '2026-01-20 12:00:00+00', '2026-01-20 12:01:00+00', NULL, 1, 0, false, false, 'upload', 'old', NULL),
	('\x9beb0f1fe98157a3160fdc735d862aa908fd2b400ed55a906cf2e8ed4044769c', '2026-03-01 11:32:00+00', '2026-03-01 13:32:00+00', NULL, 1, 0, false, false, 'upload', 'live', '{"for":"live"}'),
	('\xa4b84ede2858b5b2f2bc056a5a894208e066a91665e7b6edae7c614cf8ef20c8', '2026-03-01 11:32:00+00', '2026-03-01 11:33:00+00', NULL, 1, 0, false, false, 'upload', 'expired', '{"for":"expired"}'),
	('\x686d21b67c2a1b79d0525e13d427b72bd4602395d4b9544842d09baf354899e5', '2026-03-01 11:32:00+00', '2026-03-01 13:32:00+00', '2026-03-01 11:32:00+00', 1, 0, true, false, 'upload', 'sole', '{"for":"sole"}'),
	('\x20205bbc2dc7587feb646c8ede38869d819d1782c829ff2e009ae5e5a4b05316', '2026-03-01 11:32:00+00', '2026-03-01 13:32:00+00', NULL, 1, 0, false, true, 'upload', 'sole', '{"for":"sole"}'),
	('\x4167156be415199b4e32f317ca06df42eadda625b86871323715c90b60424e4d', '2026-03-01 11:32:00+00', '2026-03-01 13:32:00+00', NULL, 3, 1, false, false, 'upload', 'thrice', '{"for":"thrice"}'),
	('\x6b88eee30f70b05ccca44cf6d66bd07ee2f043b97cbb6729d31456025112660d', '2026-03-01 11:32:00+00', '2026-03-01 13:32:00+00', '2026-03-01 11:32:00+00', 1, 1, false, false, 'upload', 'spent', '{"for":"spent"}'),
	('\x6b29cb99e6f342c7353f60795a377ccb20ea0cf859641e7dc33435680ae96b55', '2026-03-01 11:32:00+00', '2026-03-01 13:32:00+00', '2026-03-01 11:32:00+00', 1, 0, true, false, 'upload', 'revoked', '{"for":"revoked"}');

select pg_catalog.setval('metered.holds_no_seq', 16, true);

select pg_catalog.setval('metered.leases_no_seq', 6, true);

select pg_catalog.setval('metered.lots_no_seq', 5, true);

