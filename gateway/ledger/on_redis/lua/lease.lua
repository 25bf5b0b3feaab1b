-- version, free, consumer or '', budget or '', owner, lease_s
local version, free, consumer = tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local budget, owner, lease_s = tonumber(ARGV[5]) or free, ARGV[6], tonumber(ARGV[7])
if consumer ~= '' and ARGV[5] ~= '' then
  for _, state in ipairs({'leased', 'ready', 'delivered', 'consumed'}) do
    budget = budget - tally('trajectories', state, consumer)
  end
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('later'), '-inf', version)) do
  redis.call('ZREM', key('later'), id)
  join_queue(load(id))
end

-- The head of a queue if it fits, with its place in the order.
local function head(name, rank, room)
  local id = redis.call('ZRANGE', key('queue', name), 0, 0)[1]
  local r = load(id)
  if r.size > room then return nil end
  r.rank = tonumber(rank)
  return r
end

local function next_head()
  local own, other
  if consumer ~= '' then
    local rank = redis.call('ZSCORE', key('heads'), consumer)
    if rank then own = head(consumer, rank, math.min(free, budget)) end
  end
  local heads = redis.call('ZRANGE', key('heads'), 0, 1, 'WITHSCORES')
  local at = heads[1] == consumer and 3 or 1
  if heads[at] then other = head(heads[at], heads[at + 1], free) end
  if own and (not other or own.rank < other.rank) then return own end
  return other
end

local leases = {}
while free > 0 do
  local r = next_head()
  if not r then break end
  local attempt, fence = r.attempt + 1, r.fence + 1
  free = free - r.size
  if r.consumer == consumer then budget = budget - r.size end
  r.expires = now + lease_s
  r.admitted = version
  move(r, 'lease', 'leased', 'attempt=' .. attempt .. ' version=' .. version .. ' owner=' .. owner,
    {attempt = attempt, fence = fence, report = '', owner = owner})
  local text = redis.call('HGET', key('rollout', r.id), 'request')
  leases[#leases + 1] = {text, attempt, fence, stamp(now - r.since)}
end
return finish({'ok', leases})
