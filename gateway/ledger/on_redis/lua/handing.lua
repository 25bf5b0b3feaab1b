-- Shared by deliver and deliver_exactly; comes behind the prelude.
local function by_seq(a, b) return a.seq < b.seq end

local function payloads_of(rows)
  local payloads = {}
  for i, r in ipairs(rows) do payloads[i] = redis.call('GET', key('payload', r.id)) end
  return payloads
end

-- What this delivery gave out before, in order of submission.
local function delivered_before(delivery)
  local rows = {}
  for _, id in ipairs(redis.call('SMEMBERS', key('delivery', delivery))) do
    local r = load(id)
    if r and r.delivery == delivery and (r.state == 'delivered' or r.state == 'consumed') then
      rows[#rows + 1] = r
    end
  end
  table.sort(rows, by_seq)
  return rows
end

local function repeat_delivery(rows)
  for _, r in ipairs(rows) do
    if not r.kept then return {'forgotten'} end
  end
  return {'ok', 0, 0, 0, payloads_of(rows), {}}
end

-- The answer, with staleness and trajectories of each group, which a repetition lacks.
local function give_out(rows, delivery, version, num_ready, dropped)
  table.sort(rows, by_seq)
  local given = {}
  for _, r in ipairs(rows) do
    move(r, 'deliver', 'delivered', 'version=' .. version .. ' oldest_version=' .. r.oldest,
      {delivery = delivery, staleness = version - r.oldest})
    redis.call('SADD', key('delivery', delivery), r.id)
    given[#given + 1] = {version - r.oldest, r.size}
  end
  redis.call('INCR', key('revision'))
  return {'ok', num_ready, dropped, 0, payloads_of(rows), given}
end
