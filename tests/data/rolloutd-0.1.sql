-- A database of rolloutd 0.1 in the middle of a rollout, made by its own code.
PRAGMA application_id = 1919904876;
PRAGMA user_version = 2;
BEGIN TRANSACTION;
CREATE TABLE audit (
    seq     INTEGER PRIMARY KEY,
    entry   TEXT NOT NULL,
    hash    TEXT NOT NULL,
    at      REAL GENERATED ALWAYS AS (json_extract(entry, '$.at')) VIRTUAL,
    actor   TEXT GENERATED ALWAYS AS (json_extract(entry, '$.actor.name')) VIRTUAL,
    event   TEXT GENERATED ALWAYS AS (json_extract(entry, '$.event')) VIRTUAL,
    rollout TEXT GENERATED ALWAYS AS (json_extract(entry, '$.rollout')) VIRTUAL,
    node    TEXT GENERATED ALWAYS AS (json_extract(entry, '$.node')) VIRTUAL
) STRICT;
INSERT INTO "audit" VALUES(1,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000000.0,"cause":"test","digest":null,"event":"NodesSeen","fields":{"nodes":[{"kind":"host","labels":{"rack":"r1","team":"payments"},"name":"p1","sources":["hosts"]},{"kind":"host","labels":{"rack":"r2","team":"payments"},"name":"p2","sources":["hosts"]},{"kind":"host","labels":{"rack":"r1","team":"search"},"name":"s1","sources":["hosts"]},{"kind":"host","labels":{"rack":"r2","team":"search"},"name":"s2","sources":["hosts"]}]},"node":null,"rollout":null,"seq":1}','a18e17e8075830c03c365feea07dc9f59ca045fd2a9138cba6997e9db925f48e');
INSERT INTO "audit" VALUES(2,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000000.0,"cause":"test","digest":null,"event":"DaemonStarted","fields":{"at":1800000000.0,"epoch":1,"settings_digest":"","version":"0.1.0"},"node":null,"rollout":null,"seq":2}','84e194c43026b0408fe0933f74b62eb7008836f0689f176fcc343efe99205825');
INSERT INTO "audit" VALUES(3,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000000.0,"cause":"test","digest":null,"event":"NodesSeen","fields":{"nodes":[{"kind":"host","labels":{"rack":"r1","team":"search"},"name":"x1","sources":["hosts"]}]},"node":null,"rollout":null,"seq":3}','3b1b71c8783e4dc7e45241f5eca571c7870b7336af9a1b4966397f7a652dd960');
INSERT INTO "audit" VALUES(4,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000000.0,"cause":"test","digest":null,"event":"NodesGone","fields":{"names":["x1"]},"node":null,"rollout":null,"seq":4}','72f5ddd150f89e251b11e6e2db1937bad75112995bb9cde342dd5b520ef919ec');
INSERT INTO "audit" VALUES(5,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000000.0,"cause":"test","digest":null,"event":"CallRefused","fields":{"actor":{"kind":"person","name":"olga","uid":1001},"at":1800000000.0,"call":"POST /v1/freezes","why":"only admins may"},"node":null,"rollout":null,"seq":5}','436a840a0f5081ea98db619e8de9f30b946c0f12e37eb1bc0825b3e91522ae48');
INSERT INTO "audit" VALUES(6,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000000.0,"cause":"test","digest":null,"event":"Frozen","fields":{"freeze":{"at":1800000000.0,"by":"adam","id":"f1","reason":"an incident","scope":"all","until":null}},"node":null,"rollout":null,"seq":6}','b81e94dea9290ab4649141ab509dc9c8c4cc2ded630be11682d4f2edb3453d27');
INSERT INTO "audit" VALUES(7,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000000.0,"cause":"test","digest":null,"event":"Unfrozen","fields":{"actor":{"kind":"person","name":"olga","uid":1001},"at":1800000000.0,"freeze":"f1"},"node":null,"rollout":null,"seq":7}','0d9965e8bf8c8092d323ed6c406023a1de84b41484ca643e738be388e847e588');
INSERT INTO "audit" VALUES(8,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000000.0,"cause":"test","digest":null,"event":"TeamSet","fields":{"actor":{"kind":"person","name":"olga","uid":1001},"at":1800000000.0,"canaries":["s1"],"reason":"s1 is watched","team":"search","windows":[]},"node":null,"rollout":null,"seq":8}','e9796a485be5f553f61003ecd3ebd4e856b0c478477e0acd933616452f2bfe71');
INSERT INTO "audit" VALUES(9,'{"actor":{"kind":"person","name":"olga","uid":1001},"at":1800000000.0,"cause":"plan sysctl submitted","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"RolloutOpened","fields":{"again":false,"at":1800000000.0,"digest":{"change":"59b28482efbddcec56c025174b21fbd57252833419e3b5adb830ab2521e7d96f","policy":"5c83796cff0a4581f84b41e58fbf710882cc0af141bacc8864fe6ed4a347c37d","scope":"66035c192993d8eef33377fbf6f0e2e4c2ca040f0a8acd857002741352f337c1","whole":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773"},"name":"sysctl","part":0,"selector_digest":"6032671bb1307ad0242f8d62f2388ab06a8e48f48cef7d594ad946c24a81edc5","source":{"kind":"git","pin":"c504b93a07a24cf43e35b2dea2eef67b7bf8bdbe"},"submitted_by":{"kind":"person","name":"olga","uid":1001},"supersedes":null,"targets":[{"node":"p1","pools":["team/payments","rack/r1"],"team":"payments","wave":"canary"},{"node":"s1","pools":["team/search","rack/r1"],"team":"search","wave":"canary"},{"node":"p2","pools":["team/payments","rack/r2"],"team":"payments","wave":"fleet"},{"node":"s2","pools":["team/search","rack/r2"],"team":"search","wave":"fleet"}]},"node":null,"rollout":"sysctl-jdnhv","seq":9}','aaf6fe8366bfa910756ff34e65e5c2b2c58d89d5fac506f4b79f825619d86b71');
INSERT INTO "audit" VALUES(10,'{"actor":{"kind":"person","name":"olga","uid":1001},"at":1800000000.0,"cause":"vote: because","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"VoteCast","fields":{"outside":"","token":"","vote":{"actor":{"kind":"person","name":"olga","uid":1001},"at":1800000000.0,"digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","gate":"start","id":"sysctl-jdnhv#v1","more":0,"nodes":[],"reason":"because","shown":[],"teams":["infra"],"until":null,"wave":"","withdrawn_at":null,"yes":true}},"node":null,"rollout":"sysctl-jdnhv","seq":10}','89b081647cf130e5afaf815f3c8322fcab498bfc7853e442c3d44923ac67449e');
INSERT INTO "audit" VALUES(11,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000000.0,"cause":"test","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"GateOpened","fields":{"at":1800000000.0,"gate":"start","wave":""},"node":null,"rollout":"sysctl-jdnhv","seq":11}','f353c80285ceab544be45e33db1a825892b79f759d954ac1b99d2c133d868f3e');
INSERT INTO "audit" VALUES(12,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000001.0,"cause":"test","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"PhaseMoved","fields":{"at":1800000001.0,"attempt":1,"failure":null,"isolated":null,"not_before":0.0,"outcome":null,"rolling_back":false,"source":"pending","target":"isolating","text":"","trigger":"admitted"},"node":"p1","rollout":"sysctl-jdnhv","seq":12}','6a29e82ca4679a55ba97a626dc7acba4ae50872f2a0f6ff95e91ec11452920a9');
INSERT INTO "audit" VALUES(13,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000001.0,"cause":"test","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"StepRecorded","fields":{"action":"do","at":1800000001.0,"attempt":1,"began_at":1800000001.0,"handle":"","isolated":true,"number":1,"output":null,"prior":null,"stage":"","state":"ok","step":"isolate.0.command","text":"","visible_to":null},"node":"p1","rollout":"sysctl-jdnhv","seq":13}','aa884d1abeae203a4f0d2f9243e9216eed06ed7de8e5d42f5758d83b76d7eca7');
INSERT INTO "audit" VALUES(14,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000002.0,"cause":"test","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"PhaseMoved","fields":{"at":1800000002.0,"attempt":1,"failure":null,"isolated":null,"not_before":0.0,"outcome":null,"rolling_back":false,"source":"isolating","target":"maintaining","text":"","trigger":"isolated"},"node":"p1","rollout":"sysctl-jdnhv","seq":14}','fa6d1f0ac07fb10d0656ae3d6d93b3a5caab9a0eb8972485666206da6712e300');
INSERT INTO "audit" VALUES(15,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000003.0,"cause":"test","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"PhaseMoved","fields":{"at":1800000003.0,"attempt":1,"failure":null,"isolated":null,"not_before":0.0,"outcome":null,"rolling_back":false,"source":"maintaining","target":"verifying","text":"","trigger":"maintained"},"node":"p1","rollout":"sysctl-jdnhv","seq":15}','0e8fff4dbb001b1b075a9b5c25fe9ce9cfbb1a6f0e18d5578f57012797ed0d94');
INSERT INTO "audit" VALUES(16,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000003.0,"cause":"test","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"StepRecorded","fields":{"action":"check","at":1800000003.0,"attempt":1,"began_at":1800000003.0,"handle":"","isolated":null,"number":1,"output":null,"prior":null,"stage":"","state":"ok","step":"verify.0.reachable","text":"","visible_to":null},"node":"p1","rollout":"sysctl-jdnhv","seq":16}','de2e4721decab34027d324f6d6fceec4ffa97d43b9cc3342f809eb93390555c8');
INSERT INTO "audit" VALUES(17,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000003.0,"cause":"test","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"StepRecorded","fields":{"action":"undo","at":1800000003.0,"attempt":1,"began_at":1800000003.0,"handle":"","isolated":false,"number":1,"output":null,"prior":null,"stage":"","state":"ok","step":"isolate.0.command","text":"","visible_to":null},"node":"p1","rollout":"sysctl-jdnhv","seq":17}','112ab877458ec1d20ebc1f16ee729e5bbdb1a603a2cda4f22b6acb17a1c6ae4a');
INSERT INTO "audit" VALUES(18,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000004.0,"cause":"test","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"PhaseMoved","fields":{"at":1800000004.0,"attempt":1,"failure":null,"isolated":null,"not_before":0.0,"outcome":"changed","rolling_back":false,"source":"verifying","target":"done","text":"","trigger":"verified"},"node":"p1","rollout":"sysctl-jdnhv","seq":18}','1928a97a18dff55acf2cbd21ae3910f147ecce010b821de6534cfc152740b38d');
INSERT INTO "audit" VALUES(19,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000005.0,"cause":"test","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"PhaseMoved","fields":{"at":1800000005.0,"attempt":1,"failure":{"at":1800000004.0,"attempt":1,"id":"p1#1.soak","message":"port 22: connection refused","node":"p1","step":"soak.verify.0.reachable"},"isolated":null,"not_before":0.0,"outcome":null,"rolling_back":false,"source":"done","target":"failed","text":"","trigger":"reddened"},"node":"p1","rollout":"sysctl-jdnhv","seq":19}','ed1d83c0d376a4e8126e28fd6be766c1c84ff55debc230a4140712230898ccf4');
INSERT INTO "audit" VALUES(20,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000006.0,"cause":"test","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"PhaseMoved","fields":{"at":1800000006.0,"attempt":1,"failure":null,"isolated":null,"not_before":0.0,"outcome":"skipped","rolling_back":false,"source":"failed","target":"done","text":"","trigger":"skipped"},"node":"p1","rollout":"sysctl-jdnhv","seq":20}','f174a87e5d6f788311ad716a4901b19213abffb63813b149b5d204d934611b93');
INSERT INTO "audit" VALUES(21,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000006.0,"cause":"test","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"RolloutCancelled","fields":{"actor":{"kind":"person","name":"olga","uid":1001},"at":1800000006.0,"reason":"the port was wrong"},"node":null,"rollout":"sysctl-jdnhv","seq":21}','892f7ea84120d5c11331b410e6852e0e4577d5905ec2787d5ef756c052c921e8');
INSERT INTO "audit" VALUES(22,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000006.0,"cause":"test","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"RunsRemoved","fields":{"at":1800000006.0,"keep_s":3600.0,"runs":1},"node":null,"rollout":"sysctl-jdnhv","seq":22}','a875b0086670615062af2ada1394e5a8e5c59e8e864ede6efc9a7e309f2dfa68');
INSERT INTO "audit" VALUES(23,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000006.0,"cause":"test","digest":null,"event":"HoldTaken","fields":{"hold":{"actor":{"kind":"person","name":"olga","uid":1001},"at":1800000006.0,"id":"vm-7","node":"s2","reason":"a VM moves","source":"api","until":null}},"node":"s2","rollout":null,"seq":23}','82ba39b87250dcbdd5c2561f9545271b9296ddeb17294779290d188dc8ca2945');
INSERT INTO "audit" VALUES(24,'{"actor":{"kind":"person","name":"olga","uid":1001},"at":1800000066.0,"cause":"plan sysctl submitted","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"RolloutOpened","fields":{"again":true,"at":1800000066.0,"digest":{"change":"59b28482efbddcec56c025174b21fbd57252833419e3b5adb830ab2521e7d96f","policy":"5c83796cff0a4581f84b41e58fbf710882cc0af141bacc8864fe6ed4a347c37d","scope":"66035c192993d8eef33377fbf6f0e2e4c2ca040f0a8acd857002741352f337c1","whole":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773"},"name":"sysctl","part":0,"selector_digest":"6032671bb1307ad0242f8d62f2388ab06a8e48f48cef7d594ad946c24a81edc5","source":{"kind":"git","pin":"c504b93a07a24cf43e35b2dea2eef67b7bf8bdbe"},"submitted_by":{"kind":"person","name":"olga","uid":1001},"supersedes":null,"targets":[{"node":"p1","pools":["team/payments","rack/r1"],"team":"payments","wave":"canary"},{"node":"s1","pools":["team/search","rack/r1"],"team":"search","wave":"canary"},{"node":"p2","pools":["team/payments","rack/r2"],"team":"payments","wave":"fleet"},{"node":"s2","pools":["team/search","rack/r2"],"team":"search","wave":"fleet"}]},"node":null,"rollout":"sysctl-cvlxr","seq":24}','679a7856a79475dced15cfb00be6fe640795944dbd672442ec6baf3786c74279');
INSERT INTO "audit" VALUES(25,'{"actor":{"kind":"person","name":"olga","uid":1001},"at":1800000066.0,"cause":"vote: because","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"VoteCast","fields":{"outside":"","token":"","vote":{"actor":{"kind":"person","name":"olga","uid":1001},"at":1800000066.0,"digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","gate":"start","id":"sysctl-cvlxr#v1","more":0,"nodes":[],"reason":"because","shown":[],"teams":["infra"],"until":null,"wave":"","withdrawn_at":null,"yes":true}},"node":null,"rollout":"sysctl-cvlxr","seq":25}','bbe5383c5747410d090fdd7059b41c5d389d7fab7be34b4b819fd91d1949b43a');
INSERT INTO "audit" VALUES(26,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000066.0,"cause":"test","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"GateOpened","fields":{"at":1800000066.0,"gate":"start","wave":""},"node":null,"rollout":"sysctl-cvlxr","seq":26}','712c41960e5c70265f7c5d655aa46cc890307b559c1506ac8c96d3fdae67eb74');
INSERT INTO "audit" VALUES(27,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000066.0,"cause":"test","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"LookedCurrent","fields":{"at":1800000066.0,"text":"verify.0.reachable: port 22: connection refused"},"node":"p1","rollout":"sysctl-cvlxr","seq":27}','55bf1b0507c245fa7236d7da652c172dc04c0b6f94905f46178a973a14b2fa6b');
INSERT INTO "audit" VALUES(28,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000067.0,"cause":"test","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"PhaseMoved","fields":{"at":1800000067.0,"attempt":1,"failure":null,"isolated":null,"not_before":0.0,"outcome":null,"rolling_back":false,"source":"pending","target":"isolating","text":"","trigger":"admitted"},"node":"p1","rollout":"sysctl-cvlxr","seq":28}','52c03570c3efc0f6870911b4ef6e1789d20525235cfca783adb0b18fb9374370');
INSERT INTO "audit" VALUES(29,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000067.0,"cause":"test","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"StepRecorded","fields":{"action":"do","at":1800000067.0,"attempt":1,"began_at":1800000067.0,"handle":"","isolated":true,"number":1,"output":null,"prior":"5b5a61c2d7422e28653df266ce3ae5cd6408dfdb0d2e83b47cd1cb6911676b51","stage":"","state":"intended","step":"isolate.0.command","text":"","visible_to":null},"node":"p1","rollout":"sysctl-cvlxr","seq":29}','beb2fd639045a63df6e98492a5c531727c38d4815beab09646d156ab7860a35b');
INSERT INTO "audit" VALUES(30,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000069.0,"cause":"test","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"StepRecorded","fields":{"action":"do","at":1800000069.0,"attempt":1,"began_at":1800000067.0,"handle":"","isolated":null,"number":1,"output":null,"prior":"5b5a61c2d7422e28653df266ce3ae5cd6408dfdb0d2e83b47cd1cb6911676b51","stage":"","state":"busy","step":"isolate.0.command","text":"a pod is held by its budget","visible_to":null},"node":"p1","rollout":"sysctl-cvlxr","seq":30}','8559d9a46ffdba5c8d4f7d2c27d16518d4c3d908fdd9eb25c8eb4786fc8cd266');
INSERT INTO "audit" VALUES(31,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000069.0,"cause":"test","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"StepRecorded","fields":{"action":"undo","at":1800000069.0,"attempt":1,"began_at":1800000069.0,"handle":"","isolated":null,"number":1,"output":null,"prior":null,"stage":"","state":"intended","step":"isolate.0.command","text":"","visible_to":null},"node":"p1","rollout":"sysctl-cvlxr","seq":31}','8c560596a181927b8167eb06ad8f600e93b89730b4f9a1be47956e53a01b9325');
INSERT INTO "audit" VALUES(32,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000069.0,"cause":"test","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"StepRecorded","fields":{"action":"undo","at":1800000069.0,"attempt":1,"began_at":1800000069.0,"handle":"","isolated":false,"number":1,"output":null,"prior":null,"stage":"","state":"ok","step":"isolate.0.command","text":"in service","visible_to":null},"node":"p1","rollout":"sysctl-cvlxr","seq":32}','70c180e5622e42bc926882ee5d75186d87f3cafb1507ce0981319d1597141e0c');
INSERT INTO "audit" VALUES(33,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000070.0,"cause":"test","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"PhaseMoved","fields":{"at":1800000070.0,"attempt":1,"failure":null,"isolated":null,"not_before":1800000129.0,"outcome":null,"rolling_back":false,"source":"isolating","target":"pending","text":"a pod is held by its budget","trigger":"put-back"},"node":"p1","rollout":"sysctl-cvlxr","seq":33}','7aa561162596b2f69262c0c72005c52f52fe77c280070997da876390c7bfcf1c');
INSERT INTO "audit" VALUES(34,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000070.0,"cause":"test","digest":null,"event":"NodeLetGo","fields":{"at":1800000070.0,"kind":"kubernetes"},"node":"s1","rollout":null,"seq":34}','613f7a84e2ae894293dfdedb1a82eb5818294f3e1fdd6211c304923abb5b45fc');
INSERT INTO "audit" VALUES(35,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000190.0029998,"cause":"inventory refreshed","digest":null,"event":"NodesSeen","fields":{"nodes":[{"kind":"host","labels":{"rack":"r1","team":"payments"},"name":"p1","sources":["hosts"]},{"kind":"host","labels":{"rack":"r2","team":"payments"},"name":"p2","sources":["hosts"]},{"kind":"host","labels":{"rack":"r1","team":"search"},"name":"s1","sources":["hosts"]},{"kind":"host","labels":{"rack":"r2","team":"search"},"name":"s2","sources":["hosts"]}]},"node":null,"rollout":null,"seq":35}','32a0814134381c914c79756fcf0433174bc9404dd5d2a76398bef96709a95945');
INSERT INTO "audit" VALUES(36,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000190.0079994,"cause":"decided","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"PhaseMoved","fields":{"at":1800000190.0079994,"attempt":2,"failure":null,"isolated":null,"not_before":0.0,"outcome":null,"rolling_back":false,"source":"pending","target":"isolating","text":"","trigger":"admitted"},"node":"p1","rollout":"sysctl-cvlxr","seq":36}','7798f5b6df342b043ed48b9f143f657d5678215c8ed89535708643dc5533599b');
INSERT INTO "audit" VALUES(37,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000190.014999,"cause":"isolate.0.command intended","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"StepRecorded","fields":{"action":"do","at":1800000190.014999,"attempt":2,"began_at":1800000190.014999,"handle":"","isolated":true,"number":1,"output":null,"prior":"5b5a61c2d7422e28653df266ce3ae5cd6408dfdb0d2e83b47cd1cb6911676b51","stage":"","state":"intended","step":"isolate.0.command","text":"","visible_to":null},"node":"p1","rollout":"sysctl-cvlxr","seq":37}','c54027e9e96a5feb4c48af70acaba511a2872a7858f40d7dd0433d3bdff84fbd');
INSERT INTO "audit" VALUES(38,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000190.0199986,"cause":"isolate.0.command ok","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"StepRecorded","fields":{"action":"do","at":1800000190.0199986,"attempt":2,"began_at":1800000190.014999,"handle":"","isolated":null,"number":1,"output":null,"prior":"5b5a61c2d7422e28653df266ce3ae5cd6408dfdb0d2e83b47cd1cb6911676b51","stage":"","state":"ok","step":"isolate.0.command","text":"p1 is isolated","visible_to":null},"node":"p1","rollout":"sysctl-cvlxr","seq":38}','e7d965a043cd0bba3b44eb59b20a05f18c4f8d25bfa435f1ddf9cf94301966aa');
INSERT INTO "audit" VALUES(39,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000190.026998,"cause":"isolated","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"PhaseMoved","fields":{"at":1800000190.026998,"attempt":2,"failure":null,"isolated":null,"not_before":0.0,"outcome":null,"rolling_back":false,"source":"isolating","target":"maintaining","text":"","trigger":"isolated"},"node":"p1","rollout":"sysctl-cvlxr","seq":39}','85212d3fe9bc5db025742b4f9f927b4bb99a0a29959febf7363957cdd699805e');
INSERT INTO "audit" VALUES(40,'{"actor":{"kind":"daemon","name":"rolloutd","uid":null},"at":1800000190.0339975,"cause":"run.configure intended","digest":"869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773","event":"StepRecorded","fields":{"action":"run","at":1800000190.0339975,"attempt":2,"began_at":1800000190.0339975,"handle":"sysctl-cvlxr.p1.2.configure.1","isolated":null,"number":1,"output":null,"prior":null,"stage":"configure","state":"intended","step":"run.configure","text":"","visible_to":null},"node":"p1","rollout":"sysctl-cvlxr","seq":40}','5e1d1b6894bfd148911853a2c6b477854dc1994194265b0804b6b37a8d511f81');
CREATE TABLE failure (
    number  INTEGER PRIMARY KEY,
    rollout TEXT NOT NULL,
    id      TEXT NOT NULL,
    node    TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    step    TEXT NOT NULL,
    message TEXT NOT NULL,
    at      REAL NOT NULL,
    UNIQUE (rollout, id),
    FOREIGN KEY (rollout, node) REFERENCES target (rollout, node)
) STRICT;
INSERT INTO "failure" VALUES(1,'sysctl-jdnhv','p1#1.soak','p1',1,'soak.verify.0.reachable','port 22: connection refused',1800000004.0);
CREATE TABLE freeze (
    id     TEXT PRIMARY KEY,
    scope  TEXT NOT NULL,
    reason TEXT NOT NULL,
    by     TEXT NOT NULL,
    at     REAL NOT NULL,
    until  REAL
) STRICT, WITHOUT ROWID;
CREATE TABLE hold (
    node   TEXT NOT NULL,
    source TEXT NOT NULL,
    id     TEXT NOT NULL,
    actor  TEXT NOT NULL,
    reason TEXT NOT NULL,
    at     REAL NOT NULL,
    until  REAL,
    PRIMARY KEY (node, source, id)
) STRICT, WITHOUT ROWID;
INSERT INTO "hold" VALUES('s2','api','vm-7','{"kind":"person","name":"olga","uid":1001}','a VM moves',1800000006.0,NULL);
CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE node (
    name       TEXT PRIMARY KEY,
    kind       TEXT NOT NULL,
    sources    TEXT NOT NULL,
    labels     TEXT NOT NULL,
    connection TEXT NOT NULL DEFAULT '{}',
    gone_at    REAL
) STRICT;
INSERT INTO "node" VALUES('p1','host','["hosts"]','{"rack":"r1","team":"payments"}','{}',NULL);
INSERT INTO "node" VALUES('p2','host','["hosts"]','{"rack":"r2","team":"payments"}','{}',NULL);
INSERT INTO "node" VALUES('s1','host','["hosts"]','{"rack":"r1","team":"search"}','{}',NULL);
INSERT INTO "node" VALUES('s2','host','["hosts"]','{"rack":"r2","team":"search"}','{}',NULL);
INSERT INTO "node" VALUES('x1','host','["hosts"]','{"rack":"r1","team":"search"}','{}',1800000000.0);
CREATE TABLE opened (
    number  INTEGER PRIMARY KEY,
    rollout TEXT NOT NULL REFERENCES rollout (id),
    gate    TEXT NOT NULL,
    wave    TEXT NOT NULL,
    at      REAL NOT NULL,
    UNIQUE (rollout, gate, wave)
) STRICT;
INSERT INTO "opened" VALUES(1,'sysctl-jdnhv','start','',1800000000.0);
INSERT INTO "opened" VALUES(2,'sysctl-cvlxr','start','',1800000066.0);
CREATE TABLE rollout (
    number          INTEGER PRIMARY KEY,
    id              TEXT NOT NULL UNIQUE,
    name            TEXT NOT NULL,
    content         TEXT NOT NULL,
    source          TEXT NOT NULL,
    change_digest   TEXT NOT NULL,
    scope_digest    TEXT NOT NULL,
    policy_digest   TEXT NOT NULL,
    digest          TEXT NOT NULL,
    selector_digest TEXT NOT NULL,
    submitted_by    TEXT NOT NULL,
    submitted_at    REAL NOT NULL,
    approved_count  INTEGER NOT NULL,
    amendments      INTEGER NOT NULL DEFAULT 0,
    paused_by       TEXT,
    paused_reason   TEXT,
    paused_at       REAL,
    cancelled_by    TEXT,
    cancelled_reason TEXT,
    cancelled_at    REAL,
    ended_at        REAL,
    deleted_at      REAL
, supersedes TEXT) STRICT;
INSERT INTO "rollout" VALUES(1,'sysctl-jdnhv','sysctl','{"apiVersion":"rolloutd/v1","kind":"MaintenancePlan","metadata":{"description":null,"name":"sysctl","owner":"infra","ticket":null},"spec":{"canary":null,"enrol":"auto","gates":{"continue":{"each_team":1,"four_eyes":false,"owner":1,"per_team":false},"proceed":{"each_team":0,"four_eyes":false,"owner":1,"per_team":false},"start":{"each_team":0,"four_eyes":false,"owner":1,"per_team":false}},"isolate":[{"command":{"do":"true","timeout":300,"undo":"true"}}],"limits":{"isolate":900,"votes":null},"maintain":[{"expected":900,"name":"configure","on_unknown":"verify","playbook":"site.yml","timeout":1800,"vars":{}}],"max_parallel":null,"pools":{"by":[]},"probation":0,"rollback":{"playbook":"undo.yml","timeout":1800,"vars":{},"verify":null},"soak":600,"source":{"git":"https://git.example/infra/playbooks.git","path":null,"ref":"main"},"targets":"","traffic":[],"verify":[{"reachable":{"in_service":false,"within":300}}],"waves":[],"windows":[]}}','{"kind":"git","pin":"c504b93a07a24cf43e35b2dea2eef67b7bf8bdbe"}','59b28482efbddcec56c025174b21fbd57252833419e3b5adb830ab2521e7d96f','66035c192993d8eef33377fbf6f0e2e4c2ca040f0a8acd857002741352f337c1','5c83796cff0a4581f84b41e58fbf710882cc0af141bacc8864fe6ed4a347c37d','869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773','6032671bb1307ad0242f8d62f2388ab06a8e48f48cef7d594ad946c24a81edc5','{"kind":"person","name":"olga","uid":1001}',1800000000.0,4,0,NULL,NULL,NULL,'{"kind":"person","name":"olga","uid":1001}','the port was wrong',1800000006.0,NULL,NULL,NULL);
INSERT INTO "rollout" VALUES(2,'sysctl-cvlxr','sysctl','{"apiVersion":"rolloutd/v1","kind":"MaintenancePlan","metadata":{"description":null,"name":"sysctl","owner":"infra","ticket":null},"spec":{"canary":null,"enrol":"auto","gates":{"continue":{"each_team":1,"four_eyes":false,"owner":1,"per_team":false},"proceed":{"each_team":0,"four_eyes":false,"owner":1,"per_team":false},"start":{"each_team":0,"four_eyes":false,"owner":1,"per_team":false}},"isolate":[{"command":{"do":"true","timeout":300,"undo":"true"}}],"limits":{"isolate":900,"votes":null},"maintain":[{"expected":900,"name":"configure","on_unknown":"verify","playbook":"site.yml","timeout":1800,"vars":{}}],"max_parallel":null,"pools":{"by":[]},"probation":0,"rollback":{"playbook":"undo.yml","timeout":1800,"vars":{},"verify":null},"soak":600,"source":{"git":"https://git.example/infra/playbooks.git","path":null,"ref":"main"},"targets":"","traffic":[],"verify":[{"reachable":{"in_service":false,"within":300}}],"waves":[],"windows":[]}}','{"kind":"git","pin":"c504b93a07a24cf43e35b2dea2eef67b7bf8bdbe"}','59b28482efbddcec56c025174b21fbd57252833419e3b5adb830ab2521e7d96f','66035c192993d8eef33377fbf6f0e2e4c2ca040f0a8acd857002741352f337c1','5c83796cff0a4581f84b41e58fbf710882cc0af141bacc8864fe6ed4a347c37d','869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773','6032671bb1307ad0242f8d62f2388ab06a8e48f48cef7d594ad946c24a81edc5','{"kind":"person","name":"olga","uid":1001}',1800000066.0,4,0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE spent_token (
    id       TEXT PRIMARY KEY,
    spent_at REAL NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE step (
    rollout      TEXT NOT NULL,
    node         TEXT NOT NULL,
    attempt      INTEGER,
    step         TEXT NOT NULL,
    action       TEXT NOT NULL,
    number       INTEGER NOT NULL,
    state        TEXT NOT NULL CHECK (state IN ('intended', 'ok', 'failed', 'busy', 'unknown')),
    began_at     REAL NOT NULL,
    at           REAL NOT NULL,
    stage        TEXT NOT NULL DEFAULT '',
    content_hash TEXT NOT NULL DEFAULT '',
    handle       TEXT NOT NULL DEFAULT '',
    prior        TEXT NOT NULL DEFAULT 'null',
    text         TEXT NOT NULL DEFAULT '',
    output       TEXT NOT NULL DEFAULT '',
    visible_to   TEXT,
    FOREIGN KEY (rollout, node) REFERENCES target (rollout, node)
) STRICT;
INSERT INTO "step" VALUES('sysctl-jdnhv','p1',1,'isolate.0.command','do',1,'ok',1800000001.0,1800000001.0,'','','','null','','',NULL);
INSERT INTO "step" VALUES('sysctl-jdnhv','p1',1,'verify.0.reachable','check',1,'ok',1800000003.0,1800000003.0,'','','','null','','',NULL);
INSERT INTO "step" VALUES('sysctl-jdnhv','p1',1,'isolate.0.command','undo',1,'ok',1800000003.0,1800000003.0,'','','','null','','',NULL);
INSERT INTO "step" VALUES('sysctl-cvlxr','p1',1,'isolate.0.command','do',1,'busy',1800000067.0,1800000069.0,'','','','{"isolated":false}','a pod is held by its budget','',NULL);
INSERT INTO "step" VALUES('sysctl-cvlxr','p1',1,'isolate.0.command','undo',1,'ok',1800000069.0,1800000069.0,'','','','null','in service','',NULL);
INSERT INTO "step" VALUES('sysctl-cvlxr','p1',2,'isolate.0.command','do',1,'ok',1.80000019001499891278e+09,1.80000019001999855038e+09,'','','','{"isolated":false}','p1 is isolated','',NULL);
INSERT INTO "step" VALUES('sysctl-cvlxr','p1',2,'run.configure','run',1,'intended',1.80000019003399753568e+09,1.80000019003399753568e+09,'configure','','sysctl-cvlxr.p1.2.configure.1','null','','',NULL);
CREATE TABLE target (
    rollout       TEXT NOT NULL REFERENCES rollout (id),
    node          TEXT NOT NULL,
    team          TEXT,
    pools         TEXT NOT NULL,
    wave          TEXT NOT NULL,
    position      INTEGER NOT NULL,
    phase         TEXT NOT NULL
                  CHECK (phase IN ('pending', 'isolating', 'maintaining', 'verifying', 'done', 'failed')),
    outcome       TEXT,
    attempt       INTEGER NOT NULL,
    rolling_back  INTEGER NOT NULL CHECK (rolling_back IN (0, 1)),
    isolated      INTEGER NOT NULL CHECK (isolated IN (0, 1)),
    since         REAL NOT NULL,
    not_before    REAL NOT NULL,
    put_backs     INTEGER NOT NULL,
    last_text     TEXT NOT NULL,
    failure       TEXT,
    order_kind    TEXT,
    order_by      TEXT,
    ordered_at    REAL NOT NULL,
    joined        INTEGER NOT NULL CHECK (joined IN (0, 1)),
    needs_vote_of TEXT,
    maybe_current INTEGER NOT NULL CHECK (maybe_current IN (0, 1)),
    admitted_at   REAL NOT NULL,
    PRIMARY KEY (rollout, node),
    CHECK ((phase = 'done') = (outcome IS NOT NULL))
) STRICT, WITHOUT ROWID;
INSERT INTO "target" VALUES('sysctl-cvlxr','p1','payments','["team/payments","rack/r1"]','canary',0,'maintaining',NULL,2,0,1,1.80000019002699804303e+09,0.0,1,'',NULL,NULL,NULL,0.0,0,NULL,0,1.80000019000799942013e+09);
INSERT INTO "target" VALUES('sysctl-cvlxr','p2','payments','["team/payments","rack/r2"]','fleet',2,'pending',NULL,0,0,0,1800000066.0,0.0,0,'',NULL,NULL,NULL,0.0,0,NULL,0,0.0);
INSERT INTO "target" VALUES('sysctl-cvlxr','s1','search','["team/search","rack/r1"]','canary',1,'pending',NULL,0,0,0,1800000066.0,0.0,0,'',NULL,NULL,NULL,0.0,0,NULL,0,0.0);
INSERT INTO "target" VALUES('sysctl-cvlxr','s2','search','["team/search","rack/r2"]','fleet',3,'pending',NULL,0,0,0,1800000066.0,0.0,0,'',NULL,NULL,NULL,0.0,0,NULL,0,0.0);
INSERT INTO "target" VALUES('sysctl-jdnhv','p1','payments','["team/payments","rack/r1"]','canary',0,'done','skipped',1,0,0,1800000006.0,0.0,0,'',NULL,NULL,NULL,0.0,0,NULL,0,1800000001.0);
INSERT INTO "target" VALUES('sysctl-jdnhv','p2','payments','["team/payments","rack/r2"]','fleet',2,'pending',NULL,0,0,0,1800000000.0,0.0,0,'',NULL,NULL,NULL,0.0,0,NULL,0,0.0);
INSERT INTO "target" VALUES('sysctl-jdnhv','s1','search','["team/search","rack/r1"]','canary',1,'pending',NULL,0,0,0,1800000000.0,0.0,0,'',NULL,NULL,NULL,0.0,0,NULL,0,0.0);
INSERT INTO "target" VALUES('sysctl-jdnhv','s2','search','["team/search","rack/r2"]','fleet',3,'pending',NULL,0,0,0,1800000000.0,0.0,0,'',NULL,NULL,NULL,0.0,0,NULL,0,0.0);
CREATE TABLE team_rules (
    team     TEXT PRIMARY KEY,
    windows  TEXT NOT NULL,
    canaries TEXT NOT NULL,
    set_by   TEXT NOT NULL,
    at       REAL NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO "team_rules" VALUES('search','[]','["s1"]','{"kind":"person","name":"olga","uid":1001}',1800000000.0);
CREATE TABLE tenure (
    id     INTEGER PRIMARY KEY CHECK (id = 1),
    epoch  INTEGER NOT NULL,
    holder TEXT    NOT NULL,
    since  REAL    NOT NULL
) STRICT;
INSERT INTO "tenure" VALUES(1,1,'pid 1 on example',1800000000.0);
CREATE TABLE verdicts (
    change_digest TEXT NOT NULL,
    host_class    TEXT NOT NULL,
    verdict       TEXT NOT NULL,
    evidence      TEXT NOT NULL,
    PRIMARY KEY (change_digest, host_class)
) STRICT, WITHOUT ROWID;
CREATE TABLE vote (
    number           INTEGER PRIMARY KEY,
    id               TEXT NOT NULL UNIQUE,
    rollout          TEXT NOT NULL REFERENCES rollout (id),
    gate             TEXT NOT NULL,
    wave             TEXT NOT NULL,
    digest           TEXT NOT NULL,
    actor            TEXT NOT NULL,
    yes              INTEGER NOT NULL CHECK (yes IN (0, 1)),
    reason           TEXT NOT NULL,
    at               REAL NOT NULL,
    teams            TEXT NOT NULL,
    shown            TEXT NOT NULL,
    nodes            TEXT NOT NULL,
    more             INTEGER NOT NULL,
    until            REAL,
    withdrawn_at     REAL,
    withdrawn_by     TEXT,
    withdrawn_reason TEXT
) STRICT;
INSERT INTO "vote" VALUES(1,'sysctl-jdnhv#v1','sysctl-jdnhv','start','','869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773','{"kind":"person","name":"olga","uid":1001}',1,'because',1800000000.0,'["infra"]','[]','[]',0,NULL,NULL,NULL,NULL);
INSERT INTO "vote" VALUES(2,'sysctl-cvlxr#v1','sysctl-cvlxr','start','','869ae25a298f7c38ec8b4c3d490d653cc949e644fa15099fc75e2cef714c6773','{"kind":"person","name":"olga","uid":1001}',1,'because',1800000066.0,'["infra"]','[]','[]',0,NULL,NULL,NULL,NULL);
CREATE INDEX audit_by_rollout ON audit (rollout) WHERE rollout IS NOT NULL;
CREATE INDEX audit_by_node ON audit (node) WHERE node IS NOT NULL;
CREATE INDEX audit_by_event ON audit (event);
CREATE INDEX rollout_by_content ON rollout (change_digest, selector_digest, policy_digest);
CREATE INDEX step_by_node ON step (node, action);
CREATE UNIQUE INDEX step_by_key ON step (rollout, node, ifnull(attempt, -1), step, action, number);
CREATE INDEX vote_by_rollout ON vote (rollout);
COMMIT;
