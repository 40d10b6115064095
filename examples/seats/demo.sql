-- Two organisations to try the program with, each with an event of 5 sections of 10 rows of 10 seats.

insert into hall.organisations values (gen_random_uuid(), 'City Theatre'), (gen_random_uuid(), 'Harbour Hall');

insert into hall.users
select gen_random_uuid(), o.id, u.name, u.role
from (values
    ('City Theatre', 'Ada (manager)', 'manager'), ('City Theatre', 'Bo (box office)', 'box_office'),
    ('City Theatre', 'Ben', 'customer'), ('City Theatre', 'Cleo', 'customer'), ('City Theatre', 'Dan', 'customer'),
    ('Harbour Hall', 'Eve (manager)', 'manager'), ('Harbour Hall', 'Finn', 'customer'), ('Harbour Hall', 'Gwen', 'customer')
) u (org, name, role) join hall.organisations o on o.name = u.org;

insert into hall.events
select gen_random_uuid(), o.id, e.name, 'published'
from (values ('City Theatre', 'A Winter''s Tale'), ('Harbour Hall', 'Chamber Music on Sunday')) e (org, name)
join hall.organisations o on o.name = e.org;

insert into hall.blocks
select gen_random_uuid(), e.id, b.position, b.name, b.cents, 100
from hall.events e, (values
    (0, 'Stalls left', 4500), (1, 'Stalls centre', 5200), (2, 'Stalls right', 4500), (3, 'Balcony left', 3000), (4, 'Balcony right', 3000)
) b (position, name, cents);

insert into hall.seats (id, event, block, ordinal, row, number)
select gen_random_uuid(), b.event, b.id, 100 * b.position + n, chr(ascii('A') + n / 10), n % 10 + 1
from hall.blocks b, generate_series(0, 99) n;
